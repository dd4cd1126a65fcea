"""Dtypes, layouts and orders in memory, which schemas and TorchScript know by numbers."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8,
    torch.quint8, torch.qint32, torch.bfloat16,
)  # fmt: skip
"""By the numbers that TorchScript knows them by (c10/core/ScalarType.h)."""
LAYOUTS = (torch.strided,)
FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
"""By number (c10/core/MemoryFormat.h)."""
_NUMBERED = {"ScalarType": DTYPES, "Layout": LAYOUTS, "MemoryFormat": FORMATS}


def as_given(value: Any, argument: Any) -> Any:
    """A value of TorchScript's, or a schema's default, as Python gives it to an operator: a dtype
    in place of its number.

    Raises ValueError for a number of none that is known.
    """
    for name, kinds in _NUMBERED.items():
        if name in str(argument.real_type) and type(value) is int:
            if not 0 <= value < len(kinds):
                raise ValueError(f"{argument.name} is number {value} of {name}")
            return kinds[value]
    return value


def number_of(value: Any) -> int | None:
    """TorchScript's number of a dtype, layout or order in memory; None for anything else."""
    for kinds in _NUMBERED.values():
        for number, each in enumerate(kinds):
            if each is value:
                return number
    return None
