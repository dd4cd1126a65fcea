"""What an optimization did, what it left alone, and why: as text and as data."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any


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

    @property
    def done(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.done]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.done]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"oxytorch.optimize: {self.model}, {self.dtype}, {self.seconds:.2f} s, parameters "
            f"{self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB"
        ]
        lines += ["done"] + (_table(self.done) or ["  nothing"])
        if self.left:
            lines += ["left alone"] + _table(self.left)
        if self.verified is not None:
            lines.append(
                "verified: largest difference {difference:.2e} of the largest output "
                "(allowed {allowed:.2e}), {modules:.0f} modules compared".format(**self.verified)
            )
        if self.tuned is not None:
            lines.append("tuned")
            lines += [f"  {name:<32} {text}" for name, text in self.tuned["lines"]]
        return "\n".join(lines)


def _table(entries: list[Entry]) -> list[str]:
    """Group entries that differ only in a number of the module's path, longest groups first."""
    groups: dict[tuple[str, str, str], int] = defaultdict(int)
    for entry in entries:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", entry.module) or "(the model)"
        groups[entry.pass_name, entry.detail, pattern] += 1
    return [
        f"  {name:<14}{count:>4} x {detail:<46} {pattern}".rstrip()
        for (name, detail, pattern), count in groups.items()
    ]
