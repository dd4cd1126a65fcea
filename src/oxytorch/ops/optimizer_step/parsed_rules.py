"""rules.py in its parsed form, for the kernels of GPUs; the library's are written when it is built.

It is read as text, where a GPU's kernels are asked for: programs that stay on the CPU do without.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from ... import _garbage
from .translation.parsing import Family, Rules, parse


@functools.cache
def rules() -> Rules:
    """All of rules.py."""
    text = (Path(__file__).parent / "rules.py").read_text(encoding="utf-8")
    with _garbage.paused():
        return parse(text)


def families() -> Mapping[str, Family]:
    """All optimizers by the name of their rule."""
    return rules().families
