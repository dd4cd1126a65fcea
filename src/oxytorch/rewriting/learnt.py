"""Times of layers that `tune=True` took, kept in the user's cache for later processes.

A file holds the times of one processor, level of instruction set, torch and library: with another
of these another file is read. What a time depends on besides is its key, as `_spelled` writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch

from .. import __version__, _library, isa
from ..core import cache as files
from ..core import processor

_KIND = "times"

Times = tuple[float, ...]


@cache
def _machine(level: str) -> dict[str, Any]:
    """What all times of a file have in common."""
    library = _library.PATH.stat() if _library.loaded else None
    return {
        "processor": processor.model(),
        "cores": os.cpu_count(),
        "level": level,
        "torch": torch.__version__,
        "oxytorch": __version__,
        "library": None if library is None else [library.st_size, library.st_mtime_ns],
    }


def _name(level: str) -> str:
    machine = json.dumps(_machine(level), sort_keys=True)
    return hashlib.sha256(machine.encode()).hexdigest()[:16]


@cache
def _read(level: str) -> dict[str, Times]:
    content = files.read(_KIND, _name(level))
    found = {} if content is None else json.loads(content)["times"]
    return {key: tuple(times) for key, times in found.items()}


def _spelled(key: Any) -> str | None:
    """A key as every process writes it; None where it holds what only this process can tell."""
    if isinstance(key, tuple):
        parts = [*map(_spelled, key)]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(key, type):
        is_own = key.__module__ == "__main__"
        return None if is_own else f"{key.__module__}.{key.__qualname__}"
    is_plain = isinstance(key, str | int | float | torch.dtype | torch.memory_format | None)
    return repr(key) if is_plain else None


def recall(key: Hashable) -> Times | None:
    """The times that an earlier process took for a key; None where none did."""
    spelled = _spelled(key)
    return None if spelled is None else _read(isa.active()).get(spelled)


def keep(times: Mapping[Hashable, Times]) -> bool:
    """Keep times for later processes, beside other keys' that are kept; return whether they are."""
    level = isa.active()
    _read.cache_clear()
    spelled = {_spelled(key): found for key, found in times.items()}
    known = _read(level) | {key: found for key, found in spelled.items() if key is not None}
    content = json.dumps({"machine": _machine(level), "times": known}, indent=1)
    _read.cache_clear()
    return files.write(_KIND, _name(level), content.encode())


def kept() -> list[dict[str, Any]]:
    """What is kept: for each file its "path", its "machine", the number of its "times", and whether
    it "serves" this process."""
    folder = files.folder(_KIND)
    found = []
    for path in sorted(folder.glob("*")) if folder is not None else []:
        content = files.read(_KIND, path.name)
        if content is not None:
            own = json.loads(content)
            serves = path.name == _name(isa.active())
            times = len(own["times"])
            found.append(
                {"path": path, "machine": own["machine"], "times": times, "serves": serves}
            )
    return found


def forget() -> int:
    """Remove all files of times, and return how many there were."""
    folder = files.folder(_KIND)
    paths = [*folder.glob("*")] if folder is not None else []
    for path in paths:
        path.unlink(missing_ok=True)
    _read.cache_clear()
    return len(paths)
