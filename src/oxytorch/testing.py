"""How tests judge numbers, and the inputs and settings that bring out a kernel's mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _library

# Allowed error where plain PyTorch is more accurate: in units in the last place of the element or
# of a typical (root mean square) element of the tensor, whichever is larger, because sums that
# cancel cannot be better than their terms. docs/numerics.md says more; no environment loosens it.
ULPS: Mapping[torch.dtype, float] = {
    torch.float32: 4.0,
    torch.bfloat16: 1.0,
    torch.float16: 1.0,
    torch.float64: 4.0,
}

# Elements around guarded outputs: more than any vector holds.
GUARD = 80


def widen(value: Any) -> Any:
    """`value` with every floating-point tensor in float64; looks into lists and tuples."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(widen(item) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in `value`, a tensor or a nested list or tuple, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def assert_close(actual: Tensor, exact: Tensor, plain: Tensor, what: str = "result") -> None:
    """Raises AssertionError unless `actual` is as accurate as it has to be.

    exact: the reference in float64.
    plain: the reference in the dtype of `actual`. Allowed, element by element: twice the largest
        error of `plain`, or ULPS, whichever is larger. NaN and infinity have to stand where they
        stand in `exact`, or where `plain` has them by overflow. Integers are those of `plain`.
    """
    if actual.shape != plain.shape or actual.dtype != plain.dtype:
        raise AssertionError(
            f"{what}: expected {plain.dtype} of shape {list(plain.shape)}, "
            f"got {actual.dtype} of shape {list(actual.shape)}"
        )
    if actual.numel() == 0:
        return
    if not actual.is_floating_point():
        wrong = actual != plain
        if wrong.any():
            raise AssertionError(f"{what}: {_first(wrong, actual, plain)}")
        return
    finite = exact.isfinite() & plain.isfinite()
    special = ~finite & ~((actual == plain) | (actual.isnan() & plain.isnan()))
    if special.any():
        raise AssertionError(f"{what}: {_first(special, actual, plain)} where it is not finite")
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(finite, (actual.double() - exact).abs(), zero)
    plain_error = torch.where(finite, (plain.double() - exact).abs(), zero).max()
    typical = torch.where(finite, exact, zero).square().mean().sqrt()
    limits = torch.finfo(actual.dtype)
    ulp = limits.eps * torch.maximum(exact.abs(), typical) + limits.smallest_normal
    allowed = torch.maximum(2 * plain_error, ULPS[actual.dtype] * ulp)
    wrong = finite & ~(error <= allowed)
    if wrong.any():
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; "
            f"{_first(wrong, actual, exact)}; plain PyTorch is off by at most {plain_error:.3g}"
        )


def _first(mask: Tensor, actual: Tensor, expected: Tensor) -> str:
    where = mask.nonzero()[0].tolist()
    return f"at {where} expected {expected[tuple(where)]:.9g}, got {actual[tuple(where)]:.9g}"


def misaligned(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements after an aligned address, between NaN (or -1)."""
    filler = float("nan") if tensor.is_floating_point() else -1
    if tensor.dtype == torch.bool:
        filler = True
    block = torch.full((tensor.numel() + offset + GUARD,), filler, dtype=tensor.dtype)
    copy = block[offset : offset + tensor.numel()].view(tensor.shape)
    copy.copy_(tensor)
    return copy


def padded_rows(tensor: Tensor) -> Tensor:
    """A copy whose rows are further apart than they are long, with NaN (or -1) between."""
    if tensor.dim() < 2:
        return tensor
    filler = float("nan") if tensor.is_floating_point() else -1
    if tensor.dtype == torch.bool:
        filler = True
    block = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), filler, dtype=tensor.dtype)
    copy = block[..., : tensor.shape[-1]]
    copy.copy_(tensor)
    return copy


def transposed_storage(tensor: Tensor) -> Tensor:
    """A copy of the same shape whose first dimension is the innermost in memory."""
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@contextmanager
def arenas(used: bool = True, poisoned: bool = False) -> Iterator[None]:
    """Whether programs have arenas.

    poisoned: what nothing was written to yet there, or nobody holds any more, is NaN.
    """
    library = _library.functions()
    library.oxytorch_set_arenas(used, poisoned)
    try:
        yield
    finally:
        library.oxytorch_set_arenas(True, False)


@contextmanager
def settings(stream: bool = False, split: bool = False, guard: int = 0) -> Iterator[None]:
    """Makes small calls take the paths of large ones.

    stream: outputs bypass the caches.
    split: every item may go to its own thread.
    guard: number of 0xff elements before and after every output; `assert_guarded` looks at them.
    """
    library = _library.functions()
    library.oxytorch_set_tuning(0 if stream else -1, 0 if split else -1, guard)
    try:
        yield
    finally:
        library.oxytorch_set_tuning(-1, -1, -1)


def assert_guarded(output: Tensor, guard: int) -> None:
    """Raises AssertionError if a kernel wrote beside an output of `settings(guard=...)`."""
    block = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage()).view(torch.uint8)
    size = guard * output.dtype.itemsize
    for side, edge in (("before", block[:size]), ("after", block[-size:])):
        if not (edge == 0xFF).all():
            raise AssertionError(f"a kernel wrote {side} the output of shape {list(output.shape)}")
