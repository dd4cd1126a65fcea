"""Cores that tests may start instances on, and what is left of these."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0))
TWO = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def running(mark: str) -> list[str]:
    """Command lines of processes that have `mark` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if mark in line else []
    return found
