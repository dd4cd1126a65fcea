"""What was done to a model, what it left alone, and why: as text and as data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 2
"""Places named in one line of the text; `full()` and `as_dict()` have them all."""


@dataclass(frozen=True)
class Entry:
    """One thing applied or skipped: by which pass, at which module, and what or why."""

    pass_name: str
    module: str
    applied: bool
    detail: str


Table = Callable[[list[Entry]], list[str]]
"""Lines of entries."""


@dataclass
class Report:
    """The account of one `optimize` call. `str(report)` is for people, `as_dict()` for programs.

    `full()` is the text with all modules by name.
    """

    model: str
    dtype: str
    passes: list[str]
    entries: list[Entry] = field(default_factory=list)
    seconds: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0
    verified: dict[str, float] | None = None
    tuned: dict[str, Any] | None = None
    calls: list[str] = field(default_factory=list)

    @property
    def applied(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.applied]

    @property
    def skipped(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.applied]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def full(self) -> str:
        """Return the text with the path of every module."""
        return "\n".join(self._lines(_full_table))

    def __str__(self) -> str:
        return "\n".join(self._lines(_table))

    def _sections(self, table: Table) -> list[str]:
        """The lines of what was done and what was left alone."""
        lines = ["done", *(table(self.applied) or ["  nothing"])]
        return [*lines, "left alone", *table(self.skipped)] if self.skipped else lines

    def _lines(self, table: Table) -> list[str]:
        """The lines of the whole text."""
        lines = [
            f"oxytorch.optimize: {self.model}, {self.dtype}, {self.seconds:.2f} s, parameters "
            f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        ]
        lines += self._sections(table)
        if self.verified is not None:
            found = self.verified
            parts = f"{found['modules']:.0f} modules compared" if found["modules"] else "as a whole"
            lines.append(
                f"verified: largest difference {found['difference']:.2e} of the largest output "
                f"(allowed {found['allowed']:.2e}), {parts}"
            )
        if self.tuned is not None:
            lines.append("tuned")
            lines += [f"  {name:<32} {text}" for name, text in self.tuned["lines"]]
        if self.calls:
            lines += ["calls", *(f"  {line}" for line in self.calls)]
        return lines


def _places(entries: list[Entry]) -> dict[tuple[str, str], list[str]]:
    """The modules of which the same was said."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in entries:
        places[entry.pass_name, entry.detail].append(entry.module or "(the model)")
    return places


def _full_table(entries: list[Entry]) -> list[str]:
    """A line for what differs only in the module, and one below it for each module."""
    lines = []
    for (name, detail), modules in _places(entries).items():
        lines.append(f"  {name:<14}{len(modules):>4} x {detail}")
        lines += [f"{'':<23}{module}" for module in dict.fromkeys(modules)]
    return lines


def _table(entries: list[Entry]) -> list[str]:
    """One line for what differs only in the module; numbers in many module paths become stars."""
    lines = []
    for (name, detail), modules in _places(entries).items():
        found = [*dict.fromkeys(modules)]
        if len(found) > SHOWN:
            found = [*dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", each) for each in found)]
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        shown = f"{', '.join(found[:SHOWN])}{more}"
        lines.append(f"  {name:<14}{len(modules):>4} x {detail:<43}  {shown}".rstrip())
    return lines


def size(count: int) -> str:
    """Bytes for people, such as 0.8 MiB; less than that in KiB."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 // 10 else f"{count / 2**10:.1f} KiB"
