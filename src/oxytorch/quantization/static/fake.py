"""Layers that train with fake quantization: activations and weights hold rounded numbers.

Gradients pass through rounding as if it was not there (straight through), and are zero for
activations beyond their range. A weight is rounded by the formula of
`program.passes.quantized_weights`, operation by operation, so that training sees the very integers
that `convert` makes.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, 2018.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...graph.forward import AroundForward, OwnSignature
from ...ops.quantized_linear import steps_of_rows
from ...optim.compiler import never_compiled
from ...program.passes.places import Place
from ...program.passes.quantized_layers import Numbers
from ...program.passes.quantized_weights import LARGEST, SMALLEST
from .observers import Observer, numbers_of

CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "aten::relu": F.relu,
    "aten::relu6": F.relu6,
}
"""Activations that may come before or after rounding to a range that they leave as it is."""


def integers_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of a weight [out, ...], in float32, and the scales of outputs [out, 1, ...]."""
    rows = weight.to(torch.float32).reshape(weight.shape[0], -1)
    largest = rows.abs().amax(1)
    scales = torch.maximum(
        largest / torch.tensor(float(LARGEST), device="cpu"), torch.tensor(SMALLEST, device="cpu")
    )
    integers = torch.round(rows / scales.reshape(-1, 1))
    sizes = [-1] + [1] * (weight.dim() - 1)
    return integers.reshape(weight.shape), scales.reshape(sizes)


class _Straight(torch.autograd.Function):
    """Values in place of others, with the gradient of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _straight(x: Tensor, values: Tensor) -> Tensor:
    found: Tensor = _Straight.apply(x, values)  # type: ignore[no-untyped-call]
    return found


def rounded_weight(weight: Tensor) -> Tensor:
    """A weight rounded to its integers, with a scale for each output."""
    with torch.no_grad():
        integers, scales = integers_of(weight)
    return _straight(weight, integers * scales)


def rounded_rows(x: Tensor) -> Tensor:
    """An activation each row of which is rounded by its own largest magnitude."""
    with torch.no_grad():
        whole, steps = steps_of_rows(x.float())
    return _straight(x, whole * steps)


@dataclass
class Shared:
    """What the layers of a model share. ranges, norms: whether these are frozen."""

    symmetric: bool
    ranges: bool = False
    norms: bool = False


@dataclass
class Range:
    """The range of an activation.

    name: of the point.
    numbers: the bytes, once it is known.
    """

    name: str
    observer: Observer
    shared: Shared
    numbers: Numbers | None = None

    def __call__(self, x: Tensor, is_training: bool, seen: Tensor | None = None) -> Tensor:
        """x rounded. seen: what counts for the range in place of x."""
        if is_training and not self.shared.ranges:
            self._see(x if seen is None else seen)
        if self.numbers is None:
            return x
        limits = torch.iinfo(self.numbers.torch_dtype)
        return torch.fake_quantize_per_tensor_affine(
            x, self.numbers.scale, self.numbers.zero_point, limits.min, limits.max
        )

    def _see(self, values: Tensor) -> None:
        try:
            self.observer.see(values.detach().float())
        except ValueError as error:
            layer, _, end = self.name.rpartition(".")
            raise ValueError(
                f"training: expected finite values in the {end} of layer {layer}, {error}; a "
                "smaller learning rate may help"
            ) from None
        if self.observer.count:
            self.numbers = numbers_of(*self.observer.range(), self.shared.symmetric)


class FakeLayer(OwnSignature):
    """Stands in for the forward of a linear layer or convolution, with rounded numbers.

    place: how it stands among others.
    compute: as in a recipe, "static" or "dynamic".
    input, output: the ranges of what it takes, and of what it gives, None where that is not
        rounded.
    norm: the batch normalization that is folded into its weight.
    calls: how often it ran.
    """

    def __init__(self, module: nn.Module, place: Place, compute: str, shared: Shared) -> None:
        super().__init__(module)
        self.place, self.compute, self.shared = place, compute, shared
        self.input: Range | None = None
        self.output: Range | None = None
        self.norm: nn.Module | None = None
        self.calls = 0

    @property
    def folds(self) -> bool:
        """Whether the batch normalization is computed by the layer: with fixed statistics."""
        return self.norm is not None and (self.shared.norms or not self.norm.training)

    @never_compiled
    def __call__(self, input: Tensor) -> Tensor:
        self.calls += 1
        module: Any = self.module
        x, weight, bias = self._rounded(input), module.weight, module.bias
        if self.norm is None:
            return self.rounded_output(self._product(x, rounded_weight(weight), bias))
        factor = self._factor()
        sizes = [-1] + [1] * (weight.dim() - 1)
        if self.folds:
            shift = self._shift(factor, bias)
            folded = rounded_weight(weight * factor.reshape(sizes))
            return self.rounded_output(self._product(x, folded, shift))
        factor = torch.where(factor.abs() < _LEAST, torch.ones_like(factor), factor)
        result = self._product(x, rounded_weight(weight * factor.reshape(sizes)), None)
        channels = [-1] + [1] * (weight.dim() - 2)
        result = result / factor.reshape(channels)
        return result if bias is None else result + bias.reshape(channels)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.compute == "dynamic":
            return rounded_rows(x)
        if self.input is None:
            return x
        result = self.input(x, self.module.training)
        if self.place.is_added:
            note_rounded(x, result)
        return result

    def rounded_output(self, x: Tensor) -> Tensor:
        """What the layer gives, with its batch normalization, rounded where it is added."""
        if self.output is None:
            return x
        clamp = CLAMPS[self.place.activation]
        return self.output(x, self.module.training, clamp(x.detach()))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        module: Any = self.module
        if isinstance(module, nn.Linear):
            return F.linear(x, weight, bias)
        found: Tensor = module._conv_forward(x, weight, bias)
        return found

    # As `program.passes.convolution` folds them, operation by operation.
    def _factor(self) -> Tensor:
        norm: Any = self.norm
        factor: Tensor = torch.rsqrt(norm.running_var + torch.tensor(float(norm.eps), device="cpu"))
        return factor if norm.weight is None else factor * norm.weight

    def _shift(self, factor: Tensor, bias: Tensor | None) -> Tensor:
        norm: Any = self.norm
        shift: Tensor = -norm.running_mean
        if bias is not None:
            shift = shift + bias
        shift = shift * factor
        return shift if norm.bias is None else shift + norm.bias


_LEAST = 2.0**-40
"""The least factor of a batch normalization by which its convolution's result is divided."""


class FakeNorm(OwnSignature):
    """Stands in for the forward of a batch normalization whose convolution may compute it.

    layer: of the convolution.
    """

    def __init__(self, module: nn.Module, layer: FakeLayer) -> None:
        super().__init__(module)
        self.layer = layer

    @never_compiled
    def __call__(self, input: Tensor) -> Tensor:
        if self.layer.folds:
            return input
        return self.layer.rounded_output(type(self.module).forward(self.module, input))


_active = threading.local()


def note_rounded(x: Tensor, rounded: Tensor) -> None:
    """Have what adds x in this call of the model add the rounded one."""
    for sums in getattr(_active, "sums", ())[-1:]:
        sums.rounded[id(x)] = x, x._version, rounded


class _Sums(TorchFunctionMode):
    """Has sums add what layers have rounded, as they do once it is bytes.

    rounded: tensors with their versions and what was rounded, by their identities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _SUMS:
            # What a sum is written to stays the tensor that the code holds.
            args = (args[0] if name in _WRITING else self._of(args[0]), *map(self._of, args[1:]))
        return func(*args, **(kwargs or {}))

    def _of(self, value: Any) -> Any:
        x, version, rounded = self.rounded.get(id(value), (None, 0, None))
        return rounded if x is value and x is not None and x._version == version else value


_WRITING = frozenset(("add_", "__iadd__"))
_SUMS = _WRITING | {"add", "__add__", "__radd__"}


@contextmanager
def rounded_sums() -> Iterator[None]:
    """Within, sums add what layers have rounded."""
    sums = _Sums()
    stack = _active.__dict__.setdefault("sums", [])
    stack.append(sums)
    try:
        with sums:
            yield
    finally:
        stack.pop()


class FakeModel(AroundForward):
    """Stands around the forward of a model some of whose layers round what is added, too."""

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with rounded_sums():
            return self.forward(*args, **kwargs)
