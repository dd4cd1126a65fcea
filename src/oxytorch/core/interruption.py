"""Whose an exception is that comes up while code of a model is tried."""

from __future__ import annotations

import functools
import signal
import types
from typing import Any


def pass_on_interruption(error: BaseException) -> None:
    """Raise an error again that a handler of a signal raised, such as one for a time limit.

    It came up in code that was tried, and does not say that this code fails.
    """
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and codes:
        if trace.tb_frame.f_code in codes:
            raise error
        trace = trace.tb_next


def _code_of(handler: Any) -> types.CodeType | None:
    """The code of a handler that is written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, types.FunctionType | types.MethodType):
        handler = vars(type(handler)).get("__call__")
    code = getattr(handler, "__code__", None)  # a method has its function's
    return code if isinstance(code, types.CodeType) else None
