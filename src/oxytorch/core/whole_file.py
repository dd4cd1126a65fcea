"""Files that are whole for other processes, whenever this one ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def check_destination(path: Path, source: Path | None = None) -> None:
    """Raises FileNotFoundError or IsADirectoryError where no file can be written to `path`.

    For long work whose result goes there, to be asked before it begins.
    source: a file that the work reads; FileExistsError where `path` would replace it.
    """
    if path.is_dir():
        raise IsADirectoryError(
            f"{path}: expected the name of a file to write, found a folder; add a name to it"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path}: expected an existing folder to write to, found no {path.parent}; create it "
            "first"
        )
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise FileExistsError(f"{path} is the file that is read; name another file to write")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; at the end, in one step, that file replaces `path`.

    If the block raises, `path` stays as it was. Whoever has mapped the old file keeps it. Raises
    what `check_destination` does.
    """
    check_destination(path)
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
