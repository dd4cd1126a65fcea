"""Arguments of a kernel in the memory from which a driver reads them at each launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .images import Image

ARGUMENT_TYPES: dict[str, Any] = {
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}


class Arguments:
    """The arguments of a launch, where the driver reads them."""

    def __init__(self, image: Image, values: Sequence[float]) -> None:
        if len(values) != len(image.arguments):
            raise TypeError(
                f"{image.kernel}/{image.signature}: expected {len(image.arguments)} arguments "
                f"({', '.join(image.arguments)}), got {len(values)}"
            )
        self._image = image
        self._values = [
            ctypes.c_uint64() if kind.startswith("*") else ARGUMENT_TYPES[kind]()
            for kind in image.arguments
        ]
        scratch = [ctypes.c_uint64(0) for _ in range(image.scratch)]
        held = [*self._values, *scratch]
        self.pointers = (ctypes.c_void_p * max(1, len(held)))(
            *(ctypes.addressof(value) for value in held)
        )
        self._held = held
        for position, value in enumerate(values):
            self.set(position, value)

    def set(self, position: int, value: float) -> None:
        """Replaces an argument."""
        if position in self._image.aligned and int(value) % 16:
            raise ValueError(
                f"{self._image.kernel}/{self._image.signature}: expected a multiple of 16 as "
                f"argument {position}, got {value}"
            )
        self._values[position].value = value
