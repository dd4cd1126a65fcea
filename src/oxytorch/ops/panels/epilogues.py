"""What products do to their sums before these are rounded, in one list."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def _tanh_gelu(values: Tensor) -> Tensor:
    return F.gelu(values, approximate="tanh")


def _identity(values: Tensor) -> Tensor:
    return values


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _tanh_gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    **_UNARY,
    "add": _identity,
    "add_relu": _identity,
    **{f"{name}_add": function for name, function in _UNARY.items()},
    "silu_mul": F.silu,
    "gelu_mul": F.gelu,
    "gelu_tanh_mul": _tanh_gelu,
}
"""What each epilogue does to the sums; `_mul` then multiplies by the other half of the weight, and
`_add` adds another tensor.

C++ has the names as an enumeration, which `tools/write_panel_tables.py` writes; the summed ones and
then the gated ones come last.
"""

ADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "add": _identity,
    "add_relu": F.relu,
    **{f"{name}_add": _identity for name in _UNARY},
}
"""The epilogues that add another tensor, and what they do to the total."""

_SUMMED = frozenset(name for name in ACTIVATIONS if name.endswith("_add"))
_GATED = frozenset(name for name in ACTIVATIONS if name.endswith("_mul"))


def is_summed(epilogue: str) -> bool:
    """Whether the epilogue adds another tensor to an activation."""
    return epilogue in _SUMMED


def is_gated(epilogue: str) -> bool:
    """Whether the epilogue wants a weight whose panels alternate between gate and up."""
    return epilogue in _GATED
