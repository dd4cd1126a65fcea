"""The memory of a split weight, for code that asks for it: it can be read but not written.

It is that of the upper half, or of the float32 values that stand for both halves. torch does not
count a write to a storage as a write to the tensor, so that it would be lost. Methods that write
are refused. An item that is set in an untyped storage is not seen: only another type of the object
could refuse it, and torch asks for the type where it saves and shares storages.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.storage import TypedStorage

_WRITES = ("fill_", "copy_", "resize_", "byteswap")


class ReadOnlyStorage(TypedStorage):
    """What `Tensor.storage` returns, which others do not hold."""

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("__setitem__")

    def fill_(self, value: Any) -> None:
        _refuse("fill_")

    def copy_(self, source: Any, non_blocking: bool | None = None) -> None:
        _refuse("copy_")

    def resize_(self, size: Any) -> None:
        _refuse("resize_")


def guarded(storage: Any) -> Any:
    """The storage, which refuses to be written."""
    if isinstance(storage, TypedStorage):
        storage.__class__ = ReadOnlyStorage
    else:
        # torch keeps the object and its type, which others ask for.
        for name in _WRITES:
            setattr(storage, name, functools.partial(_refuse, name))
    return storage


def free(storage: torch.UntypedStorage) -> None:
    """Ends the guard."""
    for name in _WRITES:
        storage.__dict__.pop(name, None)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{name}: expected no write to the storage of a split weight, which is half of it; write "
        "to the parameter under torch.no_grad(), as in p.fill_(0), or to p.data"
    )
