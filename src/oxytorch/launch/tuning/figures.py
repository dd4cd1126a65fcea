"""Numbers that a script prints: a line `NAME: NUMBER`, or what a regular expression finds."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"

COMBINE: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "mean": statistics.fmean,
}
"""How the numbers of several instances become that of a placement."""


@dataclass(frozen=True)
class Figure:
    """A number that every instance prints; of several lines the last one counts.

    what: a name, or a regular expression with one group, which is the number.
    combine: how those of several instances become one, by its name in `COMBINE`.
    """

    what: str
    combine: str

    def find(self, text: str) -> float | None:
        """The number in what one instance printed; None if there is none."""
        found = self._named(text) or self._matched(text)
        if not found:
            return None
        try:
            value = float(found[-1])
        except ValueError:  # the user's own group, of other text than a number
            return None
        return value if math.isfinite(value) else None

    def of_all(self, texts: Sequence[str]) -> float | None:
        """The number of a placement; None where an instance has none."""
        values = [value for text in texts if (value := self.find(text)) is not None]
        return COMBINE[self.combine](values) if values and len(values) == len(texts) else None

    def _named(self, text: str) -> list[str]:
        start = rf"(?<!\w){re.escape(self.what)}\s*[:=]\s*({NUMBER})"
        return re.findall(start, text, re.IGNORECASE)

    def _matched(self, text: str) -> list[str]:
        return re.findall(self.what, text, re.MULTILINE) if is_expression(self.what) else []

    def how_to_print(self) -> str:
        """What a script has to print, for an error."""
        if is_expression(self.what):
            return f"a line that the regular expression {self.what!r} finds a number in"
        return f'a line like `{self.what}: 12.5`, in Python: print(f"{self.what}: {{value}}")'


@dataclass(frozen=True)
class Limit:
    """The most that a figure may be."""

    figure: Figure
    most: float

    def __str__(self) -> str:
        return f"{self.figure.what} at most {self.most:g}"


def is_expression(text: str) -> bool:
    """Whether a text is a regular expression with one group."""
    try:
        return re.compile(text).groups == 1
    except re.error:
        return False


def read_limit(text: str) -> Limit:
    """The limit that `NAME: NUMBER` says; raises ValueError for other text."""
    found = re.fullmatch(rf"\s*(.*\S)\s*[:=]\s*({NUMBER})\s*", text)
    if found is None:
        raise ValueError(f"expected NAME: NUMBER, such as 'latency: 20', got {text!r}")
    return Limit(Figure(found[1], "max"), float(found[2]))
