"""What the generated tests do with one op, one sample and one level."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oxytorch import isa, testing
from oxytorch.core.packed import PackedTensor
from oxytorch.ops import Op, Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LEVELS = [level.name for level in isa.levels() if level.supported]


@functools.cache
def samples_of(op: Op, dtype: torch.dtype) -> list[Sample]:
    """The op's test samples, the same in every process."""
    torch.manual_seed(zlib.crc32(f"{op.name} {dtype}".encode()))
    return list(op.samples(dtype, "test"))


def arguments(op: Op, sample: Sample) -> dict[str, Any]:
    """All arguments of the sample by name, defaults filled in."""
    return op.arguments(*sample.args, **sample.kwargs)


def written_tensors(op: Op, named: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call that the op writes into."""
    return testing.tensors_in([named[name] for name in op.writes])


def results_of(op: Op, function: Callable[..., Any], named: dict[str, Any]) -> list[Tensor]:
    """All that a call computes: its results, and copies of the arguments that it writes into."""
    own = {name: testing.map_tensors(_copy, named[name]) for name in op.writes}
    with torch.no_grad():
        results = function(**{**named, **own})
    return testing.tensors_in([results, *own.values()])


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, and with what lies between the elements."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@functools.cache
def expected(op: Op, dtype: torch.dtype, index: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the reference computes in float64 and in the dtype of the sample."""
    named = arguments(op, samples_of(op, dtype)[index])
    plain = results_of(op, op.reference, named)
    if not any(result.is_floating_point() for result in plain):
        return plain, plain
    wide = {name: _widened(value) for name, value in named.items()}
    return results_of(op, op.reference, wide), plain


def _widened(value: Any) -> Any:
    """The value in float64; a packed weight stays, since its values are exact."""
    return value if isinstance(value, PackedTensor) else testing.widen(value)


def moved_by(layout: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with `layout` applied to its tensors; a packed weight has its own."""
    return value if isinstance(value, PackedTensor) else testing.map_tensors(layout, value)


def call(op: Op, named: dict[str, Any], level: str) -> list[Tensor]:
    """Calls the op at `level`; fails if it was not really that level's code that ran."""
    with isa.use(level):
        isa.forget_last_called()
        results = results_of(op, op.function, named)
        ran = isa.last_called()
    # An op without results writes into its arguments.
    new = results[: len(results) - len(written_tensors(op, named))] or results
    if any(result.numel() for result in new):
        assert ran == level, f"{op.name}: expected level {level} to run, got {ran}"
    return results


def _layout_of(op: Op, name: str, layout: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`layout`; what an op writes into keeps a dense last dimension: it cannot be copied."""
    if name not in op.writes:
        return layout

    def moved(tensor: Tensor) -> Tensor:
        result = layout(tensor)
        return result if result.dim() == 0 or result.stride(-1) == 1 else tensor

    return moved


def check_numbers(op: Op, dtype: torch.dtype, index: int, level: str) -> None:
    """Compares with the reference in float64."""
    sample = samples_of(op, dtype)[index]
    exact, plain = expected(op, dtype, index)
    results = call(op, arguments(op, sample), level)
    assert len(results) == len(plain)
    for actual, wanted, usual in zip(results, exact, plain, strict=True):
        assert actual.stride() == usual.stride()
        testing.assert_close(actual, wanted, usual, f"{op.name} {sample.name}")


def check_memory(
    op: Op,
    dtype: torch.dtype,
    index: int,
    level: str,
    layout: Callable[[Tensor], Tensor],
    guard: int,
    stream: bool,
) -> None:
    """The same numbers from hostile layouts, nothing written outside, no input changed."""
    sample = samples_of(op, dtype)[index]
    exact, plain = expected(op, dtype, index)
    named = {
        name: testing.map_tensors(_layout_of(op, name, layout), value)
        for name, value in arguments(op, sample).items()
    }
    before = [tensor.clone() for tensor in testing.tensors_in(list(named.values()))]
    with testing.settings(stream=stream, split=True, guard=guard):
        results = call(op, named, level)
    for actual, wanted, usual in zip(results, exact, plain, strict=True):
        testing.assert_close(actual, wanted, usual, f"{op.name} {sample.name}")
    for actual in results[: len(results) - len(written_tensors(op, named))]:
        # The total that was not asked for has no elements and no guard is needed around it.
        testing.assert_guarded(actual, guard)
    after = testing.tensors_in(list(named.values()))
    for tensor, copy in zip(after, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), f"{op.name}: changed an input"


CONVOLUTION: dict[str, Any] = {
    "kernel_size": [3, 3],
    "out_channels": 8,
    "bias": None,
    "other": None,
    "stride": [1, 1],
    "padding": [0] * 4,
    "dilation": [1, 1],
    "groups": 1,
}
"""Arguments of a convolution of 3 x 3 with 8 outputs, beside its input and its weight."""
