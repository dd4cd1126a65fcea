"""Calls of one function by several workers at once, and all of their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from .caller import Caller
from .worker import Worker

Piece = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call."""


def call_all(
    workers: Sequence[Worker], function: Callable[..., Any], pieces: Sequence[Piece]
) -> list[Any]:
    """Has the first worker call the function with the first piece, and so on; the results in order.

    When it returns or raises, all calls that were begun have ended. Of several errors the first
    worker's is raised.
    """
    gathering = _Gathering(len(pieces))
    caller = Caller.of_this_thread()
    sent = 0
    try:
        for worker, (args, kwargs) in zip(workers, pieces, strict=False):
            worker.send(_Part(gathering, sent, caller, function, args, kwargs))
            sent += 1
    finally:
        gathering.wait(len(pieces) - sent)
    try:
        for error in gathering.errors:
            if error is not None:
                raise error
        return gathering.results
    finally:
        error = None
        del gathering  # the traceback of an error that it holds, holds this frame


class _Gathering:
    """Results and errors by piece; futures would wake the caller once for each."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.errors: list[BaseException | None] = [None] * size
        self._left = size
        self._count = threading.Lock()
        self._all = threading.Lock()
        self._all.acquire()

    def ended(self, parts: int = 1) -> None:
        """Counts parts that have ended, or that never began."""
        with self._count:
            self._left -= parts
            last = self._left == 0
        if last:
            self._all.release()

    def wait(self, never_began: int) -> None:
        """Until all parts have ended."""
        if never_began:
            self.ended(never_began)
        self._all.acquire()


class _Part:
    """One of the calls."""

    __slots__ = ("_args", "_caller", "_function", "_gathering", "_kwargs", "_place")

    def __init__(
        self,
        gathering: _Gathering,
        place: int,
        caller: Caller,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._gathering, self._place, self._caller = gathering, place, caller
        self._function, self._args, self._kwargs = function, args, kwargs

    def make(self) -> None:
        """Makes the call on the worker's thread."""
        gathering, place = self._gathering, self._place
        try:
            gathering.results[place] = self._caller.call(self._function, self._args, self._kwargs)
        except BaseException as error:
            gathering.errors[place] = error
        gathering.ended()
        del self, gathering  # the traceback of an error holds this frame
