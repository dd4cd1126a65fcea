"""Which layers multiply bytes, and which numbers their bytes stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..program import Value

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""Of what layers take and give where that is no bytes."""


@dataclass(frozen=True)
class Numbers:
    """Which numbers bytes stand for: scale * (byte - zero_point). dtype: "uint8" or "int8"."""

    scale: float
    zero_point: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the bytes."""
        return torch.uint8 if self.dtype == "uint8" else torch.int8


@dataclass(frozen=True)
class Layer:
    """How a layer is computed with bytes.

    input: which bytes it takes; None rounds each row by its own largest magnitude.
    output: those that it gives where these are added to something else; None: floating point.
    """

    input: Numbers | None
    output: Numbers | None = None


@dataclass(frozen=True)
class Smoothing:
    """Layers that take one value, each channel of which is divided by a factor, while their weights
    are multiplied.

    layers: all that take it, by name.
    alpha: how much of the range of activations moved into the weights, 0 to 1.
    factors: one a channel; none: it is left as it is, for the reason `why`.
    input: the bytes of the divided value.
    """

    layers: tuple[str, ...]
    alpha: float = 0.0
    factors: tuple[float, ...] = ()
    input: Numbers | None = None
    why: str = ""


@dataclass(frozen=True)
class Layers:
    """by_name: how layers are computed.
    smoothing: what is divided before they are.
    only_faster: whether layers are of bytes only where that is faster.
    """

    by_name: Mapping[str, Layer]
    smoothing: tuple[Smoothing, ...] = ()
    only_faster: bool = True


@dataclass(frozen=True)
class Quantization:
    """layers: those that multiply bytes.
    names: of the values that stand for parameters.
    slower: gets why layers that were timed had better be floating, empty for others, by name.
    pays: gets whether recurrent layers that were timed are of bytes, in this program and in further
        ones.
    """

    layers: Layers
    names: Mapping[Value, str]
    slower: dict[str, str] = field(default_factory=dict)
    pays: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantized:
    """layers: those that multiply bytes.
    names: returns those of parameters, by their identities.
    slower, pays: see `Quantization`.
    """

    layers: Layers
    names: Callable[[], Mapping[int, str]]
    slower: dict[str, str] = field(default_factory=dict)
    pays: dict[str, bool] = field(default_factory=dict)

    def of(self, values: Sequence[Value], tensors: Sequence[torch.Tensor]) -> Quantization:
        """The same of a program. values: those that stand for tensors."""
        names = named(values, tensors, self.names())
        return Quantization(self.layers, names, self.slower, self.pays)


def named(
    values: Sequence[Value], tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> dict[Value, str]:
    """The names of values that stand for tensors. names: of tensors, by their identities."""
    pairs = zip(values, tensors, strict=True)
    return {value: names[id(tensor)] for value, tensor in pairs if id(tensor) in names}
