"""Which lines of Python code hold a device's memory, while an allocator of ours serves it."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from . import _core

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
NO_PYTHON = "no Python code (a backward pass, or a thread of a library)"

_numbers: dict[str, int] = {}
_lock = threading.RLock()
_users = 0


def number_of(text: str) -> int:
    """The number of a site, under which reports find its text."""
    with _lock:
        number = _numbers.get(text)
        if number is None:
            number = _numbers[text] = len(_numbers) + 1
            _core.check(_core.library().oxytorch_memory_name_site(number, text.encode()))
        return number


def _here() -> int:
    """The site of the innermost Python code that is no library's."""
    frame = sys._getframe().f_back
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return number_of(NO_PYTHON)
    code = frame.f_code
    return number_of(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")


_SITE = ctypes.CFUNCTYPE(ctypes.c_int)(_here)


@contextlib.contextmanager
def note_sites() -> Iterator[None]:
    """In it, errors for want of memory and `memory_report` name the lines of code that hold most.

    For what `use` serves; it costs a few microseconds an allocation. Memory that was held before
    is counted as such. Under torch's native allocator `record` does this.
    """
    _change_users(1)
    try:
        yield
    finally:
        _change_users(-1)


def _change_users(change: int) -> None:
    global _users
    elsewhere = number_of(NO_PYTHON)
    with _lock:
        _users += change
        _core.library().oxytorch_memory_torch_sites(_SITE if _users else None, elsewhere)
