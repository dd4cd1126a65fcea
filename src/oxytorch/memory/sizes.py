"""Numbers of bytes for a person, and from one."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(count: int) -> str:
    """A number of bytes for a person."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.2f} {units[0]}"


def parse(text: str) -> int:
    """Bytes from a text such as 80GiB, 512M or 1073741824. A K is 1024 bytes.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if count < 1:
        raise ValueError(f"expected a size such as 80GiB, got {text!r}")
    return count
