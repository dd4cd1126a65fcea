"""What split parameters are in a block of code: upper halves, whole weights, or what is saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .compiler import never_compiled_alone


class _Place(threading.local):
    """computing: how many forwards of models run in this thread.
    saving: whether one is saved.
    """

    computing = 0
    saving = False


_place = _Place()


@never_compiled_alone
def is_upper_half() -> bool:
    """Whether a split parameter is nothing but its upper half here: in forwards and steps."""
    return (
        _place.computing > 0
        or not torch._C._is_torch_function_enabled()
        or torch.compiler.is_compiling()
    )


def is_computing() -> bool:
    """Whether a forward of a model runs in this thread."""
    return _place.computing > 0


def is_saving() -> bool:
    """Whether a model is saved in this thread."""
    return _place.saving


@contextmanager
def computing() -> Iterator[None]:
    """Split parameters are their upper halves inside, as layers use them."""
    _place.computing += 1
    try:
        yield
    finally:
        _place.computing -= 1


@contextmanager
def whole() -> Iterator[None]:
    """Split parameters are whole weights inside, though a forward of a model is running."""
    before, _place.computing = _place.computing, 0
    try:
        yield
    finally:
        _place.computing = before


@contextmanager
def saving() -> Iterator[None]:
    """Split parameters say inside that they are float32, as they are saved."""
    before, _place.saving = _place.saving, True
    try:
        yield
    finally:
        _place.saving = before
