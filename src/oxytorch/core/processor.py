"""The processor of this machine."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

_FACTS = Path("/proc/cpuinfo")


@cache
def model() -> str:
    """Its model's name, as Linux has it; else its architecture."""
    facts = _FACTS.read_text() if _FACTS.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", facts, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
