"""Keeps Python's garbage collector from running where it would cost or be seen."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside, where many objects at once are made to stay or where calls are watched.

    Objects that stay would set off a search of everything that torch's import left: 20 to 100 ms.
    Between watched calls a collection runs code of objects that do not belong to them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
