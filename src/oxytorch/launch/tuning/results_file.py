"""Trials in a file of JSON lines, written as they come, so that a search goes on later.

The first line describes the search, each other one is a trial: its placement and what came of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from .placements import Placement
from .trial import Trial

FORMAT, VERSION = "oxytorch.tune", 1


class OtherSearchError(Exception):
    """The file belongs to another search, or is none of ours; the text says what differs."""


class ResultsFile:
    """The trials of one search.

    search: what decides about the figures: the command, its file's contents, the machine. A file of
        another search is refused.
    seconds: the most for a trial; those that were ended sooner do not count.
    """

    def __init__(self, path: Path, search: dict[str, Any], seconds: float) -> None:
        self.path = path
        self._seconds = seconds
        self._search = search
        self._kept: dict[Placement, list[Trial]] = defaultdict(list)
        self._exists = path.exists() and not self._was_begun()
        if self._exists:
            self._read()

    def count(self) -> int:
        """How many trials there are."""
        return sum(len(trials) for trials in self._kept.values())

    def trial(self, placement: Placement, repeat: int) -> Trial | None:
        """A trial that was kept before, by its number among those of its placement."""
        trials = self._kept.get(placement, [])
        return trials[repeat] if repeat < len(trials) else None

    def peak(self) -> int:
        """Bytes of the largest process of any trial."""
        return max((each.peak for trials in self._kept.values() for each in trials), default=0)

    def add(self, placement: Placement, trial: Trial) -> None:
        """Keep a trial, on disk before this returns."""
        self._kept[placement].append(trial)
        if not self._exists:
            self._write(self._head(), "w")
            self._exists = True
        self._write({"placement": placement.data(), "trial": trial.data()}, "a")

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "search": self._search}

    def _was_begun(self) -> bool:
        """Whether the file has only a part of its first line, as this search writes it."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline()
        return not line.endswith("\n") and json.dumps(self._head()).startswith(line)

    def _write(self, data: dict[str, Any], mode: str) -> None:
        with self.path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole, _, cut = text.rpartition("\n")
        try:
            first, *others = [json.loads(line) for line in whole.splitlines()] or [None]
            if not isinstance(first, dict) or first.get("format") != FORMAT:
                raise ValueError("its first line is no search of oxytorch tune")
            if first["version"] != VERSION:
                raise ValueError(f"expected version {VERSION}, got {first['version']}")
            trials = [
                (Placement(**each["placement"]), Trial.read(each["trial"])) for each in others
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise OtherSearchError(f"{self.path} holds no results to go on with: {error}") from None
        known = first["search"]
        names = [*dict.fromkeys((*self._search, *known))]
        differing = [name for name in names if known.get(name) != self._search.get(name)]
        if differing:
            was = ", ".join(f"{name} {known.get(name)}" for name in differing)
            now = ", ".join(f"{self._search.get(name)}" for name in differing)
            raise OtherSearchError(f"{self.path} is of another search: {was}, now {now}")
        for placement, trial in trials:
            if not trial.is_late or trial.seconds >= self._seconds:
                self._kept[placement].append(trial)
        if cut:  # the last search was killed while it wrote
            self.path.write_text(whole + "\n", encoding="utf-8")


def default_path(name: str, search: dict[str, Any]) -> Path:
    """A file in the current folder, of its own for each search."""
    digest = hashlib.sha256(json.dumps(search, sort_keys=True).encode()).hexdigest()[:8]
    return Path(f"tune-{name}-{digest}.jsonl")


def contents(path: Path) -> str:
    """A word for what is in a file; of a large one, its size and time of change."""
    found = path.stat()
    if found.st_size > 1 << 20:
        return f"{found.st_size}-{found.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
