"""The way that a run takes through the model's code, instruction by instruction.

Up to Python 3.11 `sys.settrace` tells of the instructions of a frame. From 3.12 on it does so only
once it is set again, and whichever code runs, on all threads, is changed each time that it is set.
There `sys.monitoring` tells of the instructions of single functions.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from .. import _garbage
from .codes import is_models

_DEEPEST_OF_LOG = 12
"""Calls of a log's handler that are followed."""
_TEXTS = [kind.__repr__.__code__ for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)]
_TOOLS = (5, 4, 3)
"""Ids of `sys.monitoring`: that of optimizers, and those that have no use of their own."""
_NO_TOOL = "other tools watch its code (sys.monitoring)"


class Way:
    """The instructions of the model's code that a run takes, in order, on this thread.

    unseen: why nothing was noted.
    shows_sizes: whether the code makes text of a symbol, which asks nothing of it.
    """

    def __init__(self) -> None:
        self.unseen = ""
        self.shows_sizes = False
        self._taken: list[tuple[types.CodeType, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs in it."""
        self.unseen = what_hides_ways()
        with nullcontext() if self.unseen else self._noting():
            yield

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with _garbage.paused():  # what it runs belongs to objects of others
            sys.settrace(self._enter)
            try:
                yield
            finally:
                sys.settrace(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing of what runs in it: torch's code takes long to look at."""
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(trace)

    def is_same(self, other: Way) -> bool:
        """Whether another run took the same way."""
        return self._taken == other._taken

    def parts(self, other: Way) -> str:
        """The line behind which another run took another way, and its function."""
        pairs = zip(self._taken, other._taken, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        shorter = min(self._taken, other._taken, key=len)
        at = len(shorter) if same is None else same
        if at == 0:
            return "its first line"
        code, offset = shorter[at - 1]
        lines = (line for start, end, line in code.co_lines() if start <= offset < end)
        line = next(lines, code.co_firstlineno)
        return f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"

    def _enters(self, frame: types.FrameType) -> bool:
        """Whether the instructions of a call are to be noted."""
        if frame.f_code in _TEXTS and frame.f_back is not None and is_models(frame.f_back):
            self.shows_sizes = True
        return is_models(frame) and not _is_of_log(frame)

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if not self._enters(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._taken.append((frame.f_code, -1))
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._taken.append((frame.f_code, frame.f_lasti))
        return self._step


def _is_of_log(frame: types.FrameType) -> bool:
    """Whether code runs to handle a line of a log, which torch writes of symbols."""
    caller = frame.f_back
    for _ in range(_DEEPEST_OF_LOG):
        if caller is None:
            break
        if caller.f_globals.get("__name__") == "logging":
            return True
        caller = caller.f_back
    return False


if sys.version_info >= (3, 12):
    _monitoring = sys.monitoring
    _events = sys.monitoring.events
    _CALLS = (_events.PY_START, _events.PY_RESUME, _events.PY_THROW)

    class _MonitoredWay(Way):
        """The same from Python 3.12 on, where functions tell of the calls of all threads."""

        def __init__(self) -> None:
            super().__init__()
            self._thread = threading.get_ident()
            self._is_paused = False
            self._watched: dict[int, types.CodeType] = {}
            self._tool = -1

        @contextmanager
        def _noting(self) -> Iterator[None]:
            own = _own_tool()
            if own is None:  # another thread was faster
                self.unseen = _NO_TOOL
                yield
                return
            self._tool = own
            callbacks = {_events.INSTRUCTION: self._step_in} | dict.fromkeys(_CALLS, self._call)
            try:
                with _garbage.paused():
                    for event, callback in callbacks.items():
                        _monitoring.register_callback(own, event, callback)
                    _monitoring.set_events(own, sum(_CALLS))
                    yield
            finally:
                _monitoring.set_events(own, 0)
                for code in self._watched.values():
                    _monitoring.set_local_events(own, code, 0)
                for event in callbacks:
                    _monitoring.register_callback(own, event, None)
                _monitoring.free_tool_id(own)

        @contextmanager
        def paused(self) -> Iterator[None]:
            before, self._is_paused = self._is_paused, True
            try:
                yield
            finally:
                self._is_paused = before

        def _call(self, code: types.CodeType, *given: Any) -> None:
            if self._is_paused or threading.get_ident() != self._thread:
                return
            if self._enters(sys._getframe(1)):
                self._taken.append((code, -1))
                if id(code) not in self._watched:  # others may be equal
                    self._watched[id(code)] = code
                    _monitoring.set_local_events(self._tool, code, _events.INSTRUCTION)

        def _step_in(self, code: types.CodeType, offset: int) -> None:
            if self._is_paused or threading.get_ident() != self._thread:
                return
            if code.co_filename[0] != "<" or is_models(sys._getframe(1)):
                self._taken.append((code, offset))

    def _own_tool() -> int | None:
        """An id of `sys.monitoring` that was free."""
        for tool in _TOOLS:
            with suppress(ValueError):
                _monitoring.use_tool_id(tool, "oxytorch")
                return tool
        return None

else:
    _MonitoredWay = Way


def new_way() -> Way:
    """One for a run on this thread."""
    return _MonitoredWay()


def what_hides_ways() -> str:
    """Why no way can be seen on this thread now; "" if it can."""
    if sys.gettrace() is not None:
        return "a debugger watches its code"
    if sys.version_info >= (3, 12) and all(map(sys.monitoring.get_tool, _TOOLS)):
        return _NO_TOOL
    return ""
