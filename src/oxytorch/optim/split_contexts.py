"""What split parameters are in a block of code: upper halves, whole weights, or what is saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .compiler import never_compiled_alone


class _Place(threading.local):
    """computing: how many forwards of models run in this thread.
    in_layer: whether the innermost one is that of a layer of torch.
    saving: whether a model is saved.
    """

    computing = 0
    in_layer = False
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


@never_compiled_alone
def is_in_own_code() -> bool:
    """Whether the forward of a class that is no layer of torch runs in this thread."""
    if _place.computing == 0 or _place.in_layer or torch.compiler.is_compiling():
        return False
    is_followed = torch._C._is_torch_function_enabled()
    return is_followed and torch._C._functorch.peek_interpreter_stack() is None


def is_whole_alone() -> bool:
    """Whether weights are float32 to what is given no tensor of 16 bits: outside of forwards, and
    on a CPU in own code, which runs under autocast as stock PyTorch's does."""
    return _place.computing == 0 or torch.is_autocast_enabled("cpu")


def is_saving() -> bool:
    """Whether a model is saved in this thread."""
    return _place.saving


@contextmanager
def computing(in_layer: bool = False) -> Iterator[None]:
    """Split parameters are their upper halves inside, as layers use them.

    in_layer: whether it is the forward of a layer of torch.
    """
    before = _place.in_layer
    _place.computing += 1
    _place.in_layer = in_layer
    try:
        yield
    finally:
        _place.computing -= 1
        _place.in_layer = before


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
