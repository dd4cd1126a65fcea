"""Keys and values of the tokens seen so far, in tensors that are allocated once."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
"""Names of a cache's formats."""

ALIGNMENT = 64
"""Capacities are rounded up to a multiple of this."""


@dataclass
class CacheLayer:
    """Keys and values of one layer.

    keys, values: [batch, kv_heads, capacity, head_dim], bfloat16, float32 or int8.
    key_scales, value_scales: float32 [batch, kv_heads, capacity] for int8, else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        zeros: bool = True,
    ) -> CacheLayer:
        """Allocates a layer, of zeros or of what is there."""
        shape = (batch, kv_heads, capacity, head_dim)
        make = torch.zeros if zeros else torch.empty
        tensors = [make(shape, dtype=dtype, device="cpu") for _ in range(2)]
        if dtype == torch.int8:
            tensors += [make(shape[:3], device="cpu") for _ in range(2)]
        return cls(*tensors)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Keys, values and scales, as far as there are any."""
        found = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in found if tensor is not None]

    def grown(self, capacity: int, length: int) -> CacheLayer:
        """Returns a layer of another capacity with the first `length` positions of this one."""
        batch, kv_heads, _, head_dim = self.keys.shape
        result = CacheLayer.empty(batch, kv_heads, capacity, head_dim, self.keys.dtype)
        for mine, theirs in zip(self.tensors(), result.tensors(), strict=True):
            theirs[:, :, :length] = mine[:, :, :length]
        return result

    def rows(self, index: Tensor) -> CacheLayer:
        """Returns a layer whose sequences are those of this one at `index` (copies)."""
        return CacheLayer(*(tensor[index] for tensor in self.tensors()))

    def row(self, index: int) -> CacheLayer:
        """Returns the layer of one sequence (views)."""
        return CacheLayer(*(tensor[index : index + 1] for tensor in self.tensors()))

    def since(self, position: int) -> CacheLayer:
        """Returns this layer without what lies before a position (views)."""
        if position == 0:
            return self
        return CacheLayer(*(tensor[:, :, position:] for tensor in self.tensors()))

    def plain(self, length: int, beams: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the first `length` positions, in `dtype`.

        beams: [batch, capacity]; position t of sequence b is read from row beams[b, t].
        """
        scales = (self.key_scales, self.value_scales)
        result = []
        for stored, scale in zip((self.keys, self.values), scales, strict=True):
            live = stored[:, :, :length].to(dtype)
            if scale is not None:
                live = live * scale[:, :, :length, None].to(dtype)
            if beams is not None:
                row = beams[:, :length].long()
                position = torch.arange(length, device="cpu")
                live = live.transpose(1, 2)[row, position].transpose(1, 2)
            result.append(live)
        return result[0], result[1]

    def write(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Stores keys and values [batch, kv_heads, n, head_dim] at start .. start + n."""
        end = start + keys.shape[2]
        scales = (self.key_scales, self.value_scales)
        for new, stored, scale in zip(
            (keys, values), (self.keys, self.values), scales, strict=True
        ):
            if scale is None:
                stored[:, :, start:end] = new
                continue
            wide = new.float()
            unit = wide.abs().amax(-1) / 127
            scale[:, :, start:end] = unit
            divisor = torch.where(unit > 0, unit, 1)[..., None]
            stored[:, :, start:end] = (wide / divisor).round().to(torch.int8)


class KVCache:
    """Keys and values of a whole model, with a fixed capacity.

    layers: number of layers.
    batch: number of sequences.
    capacity: tokens of each sequence, rounded up to a multiple of 64.
    kv_heads: number of key and value heads, for all layers or one for each.
    head_dim: size of a head, for all layers or one for each.
    dtype: bfloat16, float32 or int8 (with a float32 scale for each token and head).
    zeros: False leaves the memory as it is, which then is taken as far as it is written.

    The attribute `length` is the number of tokens seen so far; whoever writes to the layers
    increases it.

    Raises ValueError for layers, batch or capacity below one, or another dtype.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype = torch.bfloat16,
        zeros: bool = True,
    ) -> None:
        for name, value in (("layers", layers), ("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"KVCache: expected {name} of at least 1, got {value}")
        if dtype not in DTYPES.values():
            names = ", ".join(str(known) for known in DTYPES.values())
            raise ValueError(f"KVCache: expected dtype to be one of {names}, got {dtype}")
        heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
        dims = head_dim if isinstance(head_dim, list) else [head_dim] * layers
        rounded = rounded_capacity(capacity)
        self.layers = [
            CacheLayer.empty(batch, heads[i], rounded, dims[i], dtype, zeros) for i in range(layers)
        ]
        self.batch = batch
        self.capacity = rounded
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def row(self, index: int) -> KVCache:
        """An empty cache of one sequence in the memory of sequence `index`."""
        found = copy.copy(self)
        found.layers = [layer.row(index) for layer in self.layers]
        found.batch, found.length = 1, 0
        return found

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0

    def crop(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache.crop: expected length 0 to {self.length}, got {length}")
        self.length = length


class CacheSlots:
    """Caches of several sequences, each of its own length, that can step together.

    shared: all of them, a row for each.
    slots: the same memory as a cache for each.
    """

    def __init__(self, shared: KVCache) -> None:
        self.shared = shared
        self.slots = [shared.row(index) for index in range(shared.batch)]


def rounded_capacity(tokens: int) -> int:
    """The capacity that holds `tokens`."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def reordered(beams: Tensor | None, index: Tensor, capacity: int) -> Tensor:
    """Returns the table of rows int32 [batch, capacity] after sequences were chosen by `index`.

    Positions that are written from now on lie in the row of their own sequence; `own_rows` says so
    before each write.
    """
    if beams is None:
        return index.to(torch.int32)[:, None].repeat(1, capacity)
    return beams[index]


def own_rows(beams: Tensor, start: int, end: int) -> None:
    """Notes that positions start .. end are written to the row of their own sequence."""
    beams[:, start:end] = torch.arange(beams.shape[0], dtype=beams.dtype, device="cpu")[:, None]
