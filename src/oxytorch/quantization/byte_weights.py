"""Weights of recurrent layers and tables of embeddings that are stored as bytes with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.packed import PackedTensor
from ..core.placement import empty_bytes
from ..ops import recurrent
from ..ops.panels import layout
from ..ops.quantized_embedding_bag import ROW_END, STEPS, pack_rows, scales_of_rows, unpack_rows

_Self = TypeVar("_Self", bound="ByteWeight")


class Rows(NamedTuple):
    """Rows of a weight: values are codes * scales + least.

    codes: integers in float32, [rows, columns].
    scales, least: [rows, 1].
    """

    codes: Tensor
    scales: Tensor
    least: Tensor

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32."""
        return (self.codes * self.scales + self.least).to(dtype)


class ByteWeight(PackedTensor):
    """A weight [rows, columns] stored as bytes, each row with a scale.

    It has the shape and dtype of the plain weight and its values, which are the dequantized ones
    rounded to that dtype. A write quantizes again: a row with the scale that is there where this
    gives the written values exactly, else with a new one.

    tensors: what is stored, by name.
    """

    tensors: dict[str, Tensor]
    _shared_fields = ("tensors",)

    kind: ClassVar[str]
    """What files call such weights."""
    format: ClassVar[str] = "int8"
    limits: ClassVar[tuple[int, int]]
    """The least and the largest code."""

    @classmethod
    def from_dense(cls: type[_Self], weight: Tensor) -> _Self:
        """Round a plain floating weight [rows, columns]. Scales are not finite where it is not."""
        raise NotImplementedError(f"{cls.__name__} does not say how to round a weight")

    @classmethod
    def from_tensors(
        cls: type[_Self], tensors: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> _Self:
        """Wrap the `tensors` of another weight. Raises ValueError where they do not fit."""
        form = cls.form(shape)
        for name, (wanted, size) in form.items():
            given = tensors.get(name)
            if given is None or given.dtype != wanted or tuple(given.shape) != size:
                got = "none" if given is None else f"{given.dtype} of {list(given.shape)}"
                raise ValueError(f"expected {name} {wanted} of {list(size)}, got {got}")
        result = PackedTensor._wrap(cls, shape, dtype)
        result.tensors = {name: tensors[name] for name in form}
        return result

    @classmethod
    def form(cls, shape: Sequence[int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtypes and shapes of what is stored of a weight of this shape."""
        raise NotImplementedError(f"{cls.__name__} does not say what it stores")

    def scales(self) -> Tensor:
        """Numbers that are not finite where the weight is not."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its scales are")

    def _read(self) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} does not say how to read its rows")

    def _write(self, rows: Rows) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not say how to write rows")

    def _scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and least number [rows, 1] for each row of values, float32."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to scale rows")

    def nbytes_packed(self) -> int:
        """Bytes of all that is stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def repack(self, values: Tensor) -> None:
        """Replace the stored values by `values`, a plain floating tensor of this shape."""
        values = values.detach().to(self.dtype)
        if torch.equal(self.restore(), values):
            return
        wide, before = values.float(), self._read()
        scales, least = self._scaled(wide)
        by_old = self._rounded(wide, before.scales, before.least)
        kept = (by_old.numbers(self.dtype) == values).all(1, keepdim=True)
        scales = torch.where(kept, before.scales, scales)
        self._write(self._rounded(wide, scales, torch.where(kept, before.least, least)))

    def _rounded(self, values: Tensor, scales: Tensor, least: Tensor) -> Rows:
        whole = scales.clamp_min(torch.finfo(torch.float32).tiny)
        return Rows(((values - least) / whole).round().clamp(*self.limits), scales, least)

    def restore(self) -> Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        return self._read().numbers(self.dtype)

    def copy(self: _Self) -> _Self:
        """Return a weight with stored values of its own."""
        self.sync()
        own = {name: _own(tensor) for name, tensor in self.tensors.items()}
        return self.from_tensors(own, self.shape, self.dtype)

    def why_not_packed(self) -> str | None:
        """Return why values of this shape and dtype cannot be packed, or None if they can."""
        form = {name: (t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}
        if self.dim() != 2 or not self.is_floating_point() or self.form(self.shape) != form:
            return f"it is {self.dtype} of {list(self.shape)} now"
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.sync()
        is_parameter = isinstance(self, torch.nn.Parameter)
        fields = type(self), self.tensors, tuple(self.shape), self.dtype
        return _rebuild, (*fields, is_parameter, self.requires_grad)


def _own(tensor: Tensor) -> Tensor:
    """A copy; large bytes are placed in huge pages."""
    if tensor.dtype != torch.uint8:
        return tensor.clone()
    return empty_bytes(tensor.numel()).view(tensor.shape).copy_(tensor)


def _rebuild(
    kind: type[ByteWeight],
    tensors: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    result = kind.from_tensors(tensors, shape, dtype)
    return result.as_parameter(requires_grad) if is_parameter else result


class GateWeight(ByteWeight):
    """A weight [gates * hidden, in_features] of a recurrent layer, symmetric, as the ops read it.

    tensors: panels, scales and sums, in the order of `ops.recurrent.units_together`.
    """

    gates: ClassVar[int]
    limits = (-recurrent.LARGEST, recurrent.LARGEST)

    @classmethod
    def from_dense(cls: type[_Self], weight: Tensor) -> _Self:
        """Round a plain floating weight [rows, columns]. Scales are not finite where it is not."""
        result = PackedTensor._wrap(cls, weight.shape, weight.dtype)
        result.tensors = result._made(*recurrent.rounded_weight(weight.detach()))  # type: ignore[attr-defined]
        return result

    @classmethod
    def form(cls, shape: Sequence[int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtypes and shapes of what is stored of a weight of this shape."""
        hidden = shape[0] // cls.gates
        panels = cls.gates * -(-hidden // layout.OUTPUTS)
        outputs = (panels * layout.OUTPUTS,)
        return {
            "panels": (torch.uint8, (panels, layout.panel_bytes("int8", shape[1]))),
            "scales": (torch.float32, outputs),
            "sums": (torch.int32, outputs),
        }

    def scales(self) -> Tensor:
        """Numbers that are not finite where the weight is not."""
        return self.tensors["scales"]

    def _made(self, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
        panels, sums = recurrent.pack_weight(codes, self.gates)
        return {
            "panels": panels,
            "scales": recurrent.units_together(scales, self.gates),
            "sums": sums,
        }

    def _read(self) -> Rows:
        hidden, width = self.shape[0] // self.gates, self.shape[1]
        codes = recurrent.stored_weight(self.tensors["panels"], self.gates, hidden, width)
        scales = recurrent.gates_together(self.tensors["scales"], self.gates, hidden)[:, None]
        return Rows(codes.float(), scales, torch.zeros_like(scales))

    def _write(self, rows: Rows) -> None:
        made = self._made(rows.codes.to(torch.int8), rows.scales[:, 0])
        for name, tensor in made.items():
            self.tensors[name].copy_(tensor)

    def _scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        scales = recurrent.rounded_weight(values)[1][:, None]
        return scales, torch.zeros_like(scales)


class LstmWeight(GateWeight):
    """Of an LSTM."""

    kind = "lstm"
    gates = recurrent.GATES["lstm"]


class GruWeight(GateWeight):
    """Of a GRU."""

    kind = "gru"
    gates = recurrent.GATES["gru"]


class TableWeight(ByteWeight):
    """A table [rows, columns] of embeddings.

    tensors: rows, as `ops.quantized_embedding_bag.pack_rows` makes them.
    """

    kind = "embedding"
    limits = (0, STEPS)

    @classmethod
    def from_dense(cls: type[_Self], weight: Tensor) -> _Self:
        """Round a plain floating weight [rows, columns]. Scales are not finite where it is not."""
        rows = pack_rows(weight.detach())
        return cls.from_tensors({"rows": rows}, weight.shape, weight.dtype)

    @classmethod
    def form(cls, shape: Sequence[int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtypes and shapes of what is stored of a weight of this shape."""
        return {"rows": (torch.uint8, (shape[0], shape[1] + ROW_END))}

    def scales(self) -> Tensor:
        """Numbers that are not finite where the weight is not."""
        return self._ends().sum(1)

    def _ends(self) -> Tensor:
        return self.tensors["rows"][:, -ROW_END:].contiguous().view(torch.float32)

    def restore(self) -> Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        return unpack_rows(self.tensors["rows"], self.dtype)

    def _read(self) -> Rows:
        ends = self._ends()
        return Rows(self.tensors["rows"][:, :-ROW_END].float(), ends[:, :1], ends[:, 1:])

    def _write(self, rows: Rows) -> None:
        into = self.tensors["rows"]
        into[:, :-ROW_END] = rows.codes
        into[:, -ROW_END:] = torch.cat([rows.scales, rows.least], 1).view(torch.uint8)

    def _scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return scales_of_rows(values)


KINDS: dict[str, type[ByteWeight]] = {
    kind.kind: kind for kind in (LstmWeight, GruWeight, TableWeight)
}
"""By the name that files have."""
