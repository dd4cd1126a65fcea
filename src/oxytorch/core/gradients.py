"""Gradients of parameters that become others or change their dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def give_gradient(parameter: Any, gradient: Tensor | None) -> None:
    """Make `gradient` the parameter's, in the dtype that the parameter takes: by default its own.

    Where the user set the parameter's `grad_dtype` it is that one, or any for None.
    """
    dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    if gradient is not None and dtype is not None:
        gradient = gradient.to(dtype)
    parameter.grad = gradient


def give_gradient_of(parameter: Any, other: Any, copied: Tensor | None) -> None:
    """Make `copied`, a copy of the gradient of `other`, that of its copy, in the same dtype."""
    if getattr(parameter, "grad_dtype", None) != getattr(other, "grad_dtype", None):
        parameter.grad_dtype = other.grad_dtype
    give_gradient(parameter, copied)
