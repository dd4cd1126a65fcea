"""Packed weights as data: what files say of one, beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.panels import PanelWeight
from .byte_weights import KINDS, ByteWeight

PARTS = ("panels", "channel_scales", "group_scales", "zero_points")
"""The names of a weight's tensors."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def described(weight: PanelWeight) -> dict[str, Any]:
    """All of a packed weight but its tensors."""
    return {
        "format": weight.format,
        "shape": list(weight.shape),
        "group_size": weight.group_size,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "activation": weight.activation_dtype,
        "gated": weight.is_gated,
    }


def from_description(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> PanelWeight:
    """The weight that `described` describes, over the memory of `tensors`.

    dtype: of its plain values, in place of the one that it had. Raises ValueError, KeyError or
    TypeError for what does not fit.
    """
    shape, size = _shape(data), data["group_size"]
    if size is not None and type(size) is not int:
        raise ValueError(f"expected group_size None or a number, got {str(size)[:50]}")
    if data["activation"] not in (None, "int8"):
        raise ValueError(f"expected activation None or int8, got {str(data['activation'])[:50]!r}")
    if type(data["gated"]) is not bool or (data["gated"] and shape[0] % 2):
        raise ValueError(f"expected gated for two halves, got {str(data['gated'])[:50]} of {shape}")
    weight = PanelWeight.from_tensors(
        tensors,
        format=data["format"],
        shape=shape,
        group_size=size,
        dtype=dtype or _dtype(data),
        gated=data["gated"],
    )
    weight.activation_dtype = data["activation"]
    return weight


def described_bytes(weight: ByteWeight) -> dict[str, Any]:
    """All of a weight of a recurrent layer or an embedding but its tensors."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return {"kind": weight.kind, "shape": list(weight.shape), "dtype": dtype}


def bytes_from_description(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> ByteWeight:
    """The weight that `described_bytes` describes, over the memory of `tensors`.

    dtype: as in `from_description`. Raises ValueError, KeyError or TypeError for what does not fit.
    """
    kind, shape = KINDS[data["kind"]], _shape(data)
    gates = getattr(kind, "gates", 1)
    if shape[0] % gates:
        raise ValueError(f"expected rows for {gates} gates, got {shape[0]}")
    return kind.from_tensors(tensors, shape, dtype or _dtype(data))


def _shape(data: Mapping[str, Any]) -> tuple[int, int]:
    shape = data["shape"]
    is_matrix = isinstance(shape, list) and len(shape) == 2
    if not is_matrix or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"expected a shape of two sizes above 0, got {str(shape)[:50]}")
    return shape[0], shape[1]


def _dtype(data: Mapping[str, Any]) -> torch.dtype:
    if data["dtype"] not in _DTYPES:
        raise ValueError(f"expected a floating dtype, got {str(data['dtype'])[:50]!r}")
    return _DTYPES[data["dtype"]]


def check_order(order: Tensor | None, columns: int) -> None:
    """Raise ValueError if an order of inputs is not int64 [columns], each of them once."""
    if order is None:
        return
    whole = order.dtype == torch.int64 and order.shape == (columns,)
    if not whole or not torch.equal(order.sort().values, torch.arange(columns, device="cpu")):
        raise ValueError(f"expected order to hold each of {columns} inputs once")
