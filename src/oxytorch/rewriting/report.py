"""What was done to a model, what it left alone, and why: as text and as data."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 2
"""Places named in one line of the text; `as_dict()` has them all."""


@dataclass(frozen=True)
class Entry:
    """One thing done or left: by which pass, at which module, and what or why."""

    pass_name: str
    module: str
    done: bool
    detail: str


@dataclass
class Report:
    """The account of one `optimize` call. `str(report)` is for people, `as_dict()` for programs."""

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
    def done(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.done]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.done]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sections(self) -> list[str]:
        """The lines of what was done and what was left alone."""
        lines = ["done", *(_table(self.done) or ["  nothing"])]
        return [*lines, "left alone", *_table(self.left)] if self.left else lines

    def __str__(self) -> str:
        lines = [
            f"oxytorch.optimize: {self.model}, {self.dtype}, {self.seconds:.2f} s, parameters "
            f"{self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB"
        ]
        lines += self.sections()
        if self.verified is not None:
            lines.append(
                "verified: largest difference {difference:.2e} of the largest output "
                "(allowed {allowed:.2e}), {modules:.0f} modules compared".format(**self.verified)
            )
        if self.tuned is not None:
            lines.append("tuned")
            lines += [f"  {name:<32} {text}" for name, text in self.tuned["lines"]]
        if self.calls:
            lines += ["calls", *(f"  {line}" for line in self.calls)]
        return "\n".join(lines)


def _table(entries: list[Entry]) -> list[str]:
    """One line for what differs only in the module; numbers in module paths become stars."""
    places: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in entries:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.module) or "(the model)"
        places[entry.pass_name, entry.detail][pattern] += 1
    lines = []
    for (name, detail), patterns in places.items():
        shown = [*patterns][:SHOWN]
        more = f", and {len(patterns) - SHOWN} more" if len(patterns) > SHOWN else ""
        count = sum(patterns.values())
        lines.append(f"  {name:<14}{count:>4} x {detail:<44} {', '.join(shown)}{more}".rstrip())
    return lines
