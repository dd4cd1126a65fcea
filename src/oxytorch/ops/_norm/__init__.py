"""What the normalizations over the last dimension share in Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import ParamSpec

import torch
from torch import Tensor

from .._samples import MEBI, WIDTHS, rows_of_bytes

P = ParamSpec("P")


def shapes(dtype: torch.dtype, size: str, tensors: int) -> Iterator[tuple[int, ...]]:
    """Shapes of x for a call whose traffic is `tensors` times the size of x."""
    if size == "cache":
        yield rows_of_bytes(MEBI // 2 // tensors, 768, dtype)
    elif size == "memory":
        yield rows_of_bytes(320 * MEBI // tensors, 4096, dtype)
    else:
        yield from ((3, width) for width in WIDTHS)
        yield from ((0, 8), (2, 0), (2, 3, 40), (17_000,))


def total_if_asked(
    function: Callable[P, tuple[Tensor, Tensor]],
) -> Callable[P, Tensor | tuple[Tensor, Tensor]]:
    """Returns `function` with the norm as its only result where return_total is false.

    function: an op whose last argument is return_total=True; it returns (norm, total).
    """
    signature = inspect.signature(function)
    count = len(signature.parameters)

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Tensor | tuple[Tensor, Tensor]:
        normed, total = function(*args, **kwargs)
        return_total = args[-1] if len(args) == count else kwargs.get("return_total", True)
        return (normed, total) if return_total else normed

    vars(public)["__signature__"] = signature.replace(
        return_annotation="Tensor | tuple[Tensor, Tensor]"
    )
    return public


def with_total(public: Callable[P, object]) -> Callable[P, tuple[Tensor, Tensor]]:
    """Returns the op behind a function of `total_if_asked`: it always returns (norm, total)."""
    op: Callable[P, tuple[Tensor, Tensor]] = vars(public)["__wrapped__"]
    return op
