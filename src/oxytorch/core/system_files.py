"""What Linux tells in files, and its lists of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def text_of(path: Path) -> str:
    """The text of a file, or an empty string where the system does not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # offline processors list files that cannot be read
        return ""


def numbers(text: str) -> list[int]:
    """The numbers in a list as Linux writes it: "0-2,8" is 0, 1, 2, 8.

    Raises ValueError for what is no such list.
    """
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        span = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f'expected numbers and ranges such as "0-3,8", got {part!r}')
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return found


def ranges(values: Iterable[int]) -> str:
    """Numbers as Linux writes them: 0, 1, 2, 8 is "0-2,8"."""
    spans: list[list[int]] = []
    for value in sorted(values):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
