"""Activations, most of them with numbers, of each element of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    below = torch.expm1(x.clamp(max=0) * input_scale) * (alpha * scale)
    return torch.where(x >= 0, x * scale, below)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "leaky_relu": F.leaky_relu,
    "clamp": torch.clamp,
    "elu": _elu,
    "power": torch.pow,
    "mish": F.mish,
}
"""What each computes of x and its numbers; names.h has the same names in the same order."""


@with_kernel
def activation(x: Tensor, name: str, numbers: Sequence[float]) -> Tensor:
    """Returns an activation of each element.

    x: float32, bfloat16 or float16.
    name: "leaky_relu" with the numbers slope; "clamp" with least and most, infinite where there is
        none; "elu" with alpha, scale and input_scale; "power" with a whole exponent from 2 to 8;
        "mish" without numbers.
    numbers: those of the activation; the kernel takes them as float32.

    Returns a tensor of x's shape and dtype, in its order if that is dense. Computes in float32,
    rounds once; NaN stays NaN. float64 and other devices run plain PyTorch.
    Raises RuntimeError if a dtype, the name or the numbers do not fit.
    """
    return ACTIVATIONS[name](x, *numbers)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    calls = [
        ("leaky_relu", [0.1]),
        ("clamp", [-0.5, 0.75]),
        ("elu", [1.0, 1.0, 1.0]),
        ("power", [3.0]),
    ]
    shapes: list[tuple[int, ...]] = [(3, width) for width in WIDTHS] + [(2, 5, 7, 6), (0, 4)]
    if size != "test":
        shapes = [rows_of_bytes(MEBI // 4 if size == "cache" else 160 * MEBI, 4096, dtype)] * 4
    else:
        calls += [("clamp", [-float("inf"), 0.5]), ("elu", [1.6, 1.05, 0.7]), ("power", [2.0])]
        calls += [("power", [6.0]), ("mish", [])]
    for index, shape in enumerate(shapes):
        name, numbers = calls[index % len(calls)]
        yield Sample(f"{shape_name(shape)}-{name}", (values(*shape, dtype=dtype), name, numbers))
        if index == 4 and size == "test":  # amid others: tests take the first ones, or the last
            yield from _special(dtype, calls)


def _special(dtype: torch.dtype, calls: list[tuple[str, list[float]]]) -> Iterator[Sample]:
    x = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -1e-6, -30, -100], device="cpu"
    )
    for name, numbers in calls:
        yield Sample(f"special-{name}-{sum(numbers)}", (x.repeat(40).to(dtype), name, numbers))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x, writes the result."""
    return Cost(2 * x.nbytes, 4 * x.numel())


op = register(activation, samples, cost)
