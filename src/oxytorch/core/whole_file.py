"""Files that are whole for other processes, whenever this one ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; at the end, in one step, that file replaces `path`.

    If the block raises, `path` stays as it was. Whoever has mapped the old file keeps it.
    """
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
