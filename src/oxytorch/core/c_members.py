"""Members of C structures for ctypes."""

from __future__ import annotations

from typing import Any


def members(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Entries of `_fields_` for members of one type, in order."""
    return tuple((name, kind) for name in names)
