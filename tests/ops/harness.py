"""What the generated tests do with one op, one sample and one level."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oxytorch import isa, testing
from oxytorch.ops import Op, Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LEVELS = [level.name for level in isa.levels() if level.supported]


@functools.cache
def samples_of(op: Op, dtype: torch.dtype) -> list[Sample]:
    """The op's test samples, the same in every process."""
    torch.manual_seed(zlib.crc32(f"{op.name} {dtype}".encode()))
    return list(op.samples(dtype, "test"))


@functools.cache
def expected(op: Op, dtype: torch.dtype, index: int) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the reference in float64 and in the dtype of the sample."""
    sample = samples_of(op, dtype)[index]
    wide = {name: testing.widen(value) for name, value in sample.kwargs.items()}
    with torch.no_grad():
        exact = op.reference(*testing.widen(sample.args), **wide)
        plain = op.reference(*sample.args, **sample.kwargs)
    return testing.tensors_in(exact), testing.tensors_in(plain)


def call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], level: str) -> list[Tensor]:
    """Calls the op at `level`; fails if it was not really that level's code that ran."""
    with torch.no_grad(), isa.use(level):
        isa.forget_last_called()
        results = testing.tensors_in(op.function(*args, **kwargs))
        ran = isa.last_called()
    if any(result.numel() for result in results):
        assert ran == level, f"{op.name}: expected level {level} to run, got {ran}"
    return results


def check_numbers(op: Op, dtype: torch.dtype, index: int, level: str) -> None:
    """Compares with the reference in float64."""
    sample = samples_of(op, dtype)[index]
    exact, plain = expected(op, dtype, index)
    results = call(op, sample.args, sample.kwargs, level)
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
    args = testing.map_tensors(layout, sample.args)
    kwargs = {name: testing.map_tensors(layout, value) for name, value in sample.kwargs.items()}
    before = [tensor.clone() for tensor in testing.tensors_in([args, list(kwargs.values())])]
    with testing.settings(stream=stream, split=True, guard=guard):
        results = call(op, args, kwargs, level)
    for actual, wanted, usual in zip(results, exact, plain, strict=True):
        testing.assert_close(actual, wanted, usual, f"{op.name} {sample.name}")
        # The total that was not asked for has no elements and no guard is needed around it.
        testing.assert_guarded(actual, guard)
    after = testing.tensors_in([args, list(kwargs.values())])
    for tensor, copy in zip(after, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), f"{op.name}: changed an input"


def positional(op: Op, sample: Sample) -> tuple[Any, ...]:
    """All arguments of the sample by position, defaults filled in."""
    bound = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    return bound.args
