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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    "gelu": F.gelu,
    "gelu_tanh": _tanh_gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "add": _identity,
    "add_relu": _identity,
    "silu_mul": F.silu,
    "gelu_mul": F.gelu,
    "gelu_tanh_mul": _tanh_gelu,
}
"""What each epilogue does to the sums; `_mul` then multiplies by the other half of the weight.

C++ has the names as an enumeration, which `tools/write_panel_tables.py` writes; the gated ones come
last.
"""

ADDED: dict[str, Callable[[Tensor], Tensor]] = {"add": _identity, "add_relu": F.relu}
"""The epilogues that add another tensor, and what they do to the total."""

_GATED = frozenset(name for name in ACTIVATIONS if name.endswith("_mul"))


def is_gated(epilogue: str) -> bool:
    """Whether the epilogue wants a weight whose panels alternate between gate and up."""
    return epilogue in _GATED
