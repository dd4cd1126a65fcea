"""Models that were converted to a narrow dtype compute in it, also within `torch.autocast`, where
the predecessor's programs call them."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import torch
from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)


class _Calls(threading.local):
    """Of this thread: whether autocast was on, for each call in progress."""

    def __init__(self) -> None:
        self.paused: list[bool] = []


_calls = _Calls()


def compute_in_own_dtype(model: _Model, dtype: torch.dtype | None) -> _Model:
    """Have calls of a model that was converted to `dtype` run without autocast; returns the model.

    Under autocast an optimized model would run its own code, which is slower, in the same dtype.
    """
    if dtype is not None:
        model.register_forward_pre_hook(_pause, prepend=True)
        model.register_forward_hook(_resume, always_call=True)
    return model


def _pause(model: nn.Module, args: Any) -> None:
    is_on = torch.is_autocast_enabled("cpu")
    _calls.paused.append(is_on)
    if is_on:
        torch.set_autocast_enabled("cpu", False)


def _resume(model: nn.Module, args: Any, outputs: Any) -> None:
    if _calls.paused.pop():
        torch.set_autocast_enabled("cpu", True)
