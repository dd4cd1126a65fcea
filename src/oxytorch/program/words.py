"""How a program writes constants and operators: the words of its steps."""

from __future__ import annotations

from typing import Any

import torch

from ..graph.errors import CaptureError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
DTYPES_OF: dict[type, tuple[torch.dtype, ...]] = {
    float: FLOATS,
    int: (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *FLOATS),
    bool: (torch.bool,),
    complex: (torch.complex64,),
}
"""Dtypes of tensors that may stand for a number, those that keep all of it first."""

_NAMES = {
    torch.strided: "=strided",
    torch.contiguous_format: "=contiguous_format",
    torch.preserve_format: "=preserve_format",
    torch.channels_last: "=channels_last",
    torch.channels_last_3d: "=channels_last_3d",
}
_KNOWN_DTYPES = (
    *FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
)  # fmt: skip


def target_of(schema: Any) -> str:
    """How a program calls an operator."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def name_of_dtype(dtype: torch.dtype) -> str:
    """The word for a dtype. Raises CaptureError if a program knows none."""
    if dtype not in _KNOWN_DTYPES:
        raise CaptureError(f"a program knows no {dtype}")
    return f"={dtype}".replace("torch.", "")


def holds(dtype: torch.dtype, number: int) -> bool:
    """Whether a dtype has such integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max


def word_of(value: Any, kind: str) -> str | None:
    """How a program writes a constant, None if it cannot. kind: the type in the schema."""
    if isinstance(value, torch.dtype):
        return name_of_dtype(value)
    if isinstance(value, torch.device):
        return "cpu" if value.type == "cpu" else None
    if isinstance(value, torch.layout | torch.memory_format):
        return _NAMES.get(value)
    if kind == "StringType":
        return f'"{value}"' if isinstance(value, str) and value.isidentifier() else None
    if kind == "BoolType":
        return str(value).lower() if isinstance(value, bool) else None
    if kind == "FloatType" and isinstance(value, int | float):
        return repr(float(value))
    if kind in ("IntType", "SymIntType") and type(value) is int:
        return str(value)
    return None


_CONSTANTS: dict[str, Any] = {
    **{name_of_dtype(dtype): dtype for dtype in _KNOWN_DTYPES},
    **{word: constant for constant, word in _NAMES.items()},
    "none": None,
    "cpu": torch.device("cpu"),
}


def value_of(word: str, kind: str) -> Any:
    """The constant that a word of a program says. kind: the type in the schema."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if kind == "BoolType":
        return word == "true"
    if kind == "StringType":
        return word[1:-1]
    return float(word) if kind in ("FloatType", "NumberType") else int(word)


def operator_named(name: str) -> Any:
    """The operator of a name such as "aten::add.Tensor", None if the dispatcher has none."""
    namespace, _, rest = name.partition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None
