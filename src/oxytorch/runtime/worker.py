"""Threads that make calls on cores of their own, one call after the other."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from .. import _library
from .caller import Caller
from .threads import allow, set_own_number


class Job(Protocol):
    """A call to make, which keeps its result or its error itself."""

    def make(self) -> None:
        """Makes the call, on the thread that called this; raises nothing."""


_Calls: TypeAlias = "queue.SimpleQueue[Job | None]"

_serving: dict[threading.Thread, _Calls] = {}  # every thread that runs
_here = threading.local()  # `calls`: the queue that this thread serves
_forks = 0  # how many forks lie between this process and the first one
_ending = False


class Future(concurrent.futures.Future[Any]):
    """The result of a call that another thread makes; works with all of `concurrent.futures`."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls, self._forks = calls, _forks

    def result(self, timeout: float | None = None) -> Any:
        """The call's result; waits for it, at most `timeout` seconds.

        Raises:
            BaseException: what the call raised.
            TimeoutError: it is not there in time.
            concurrent.futures.CancelledError: the call was cancelled before it began.
            RuntimeError: it would never come: the call waits for the thread that waits for it, or
                was left behind in the process that this one was forked from.
        """
        self._check_that_it_comes()
        try:
            return super().result(timeout)
        finally:
            del self  # the traceback of an error, which this future holds, holds this frame

    get = result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None; waits for it as `result` does."""
        self._check_that_it_comes()
        return super().exception(timeout)

    def _check_that_it_comes(self) -> None:
        if self._forks == _forks and getattr(_here, "calls", None) is not self._calls:
            return
        if self.done():
            return
        if self._forks != _forks:
            raise RuntimeError(
                "Future: this call was left behind in the process that this one was forked from; "
                "make it again"
            )
        raise RuntimeError(
            "Future: this call waits for the one that asks for its result, because one thread "
            "makes both; call the model itself, or use another Task"
        )


class _Call(NamedTuple):
    future: Future
    caller: Caller
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.caller.call(self.function, self.args, self.kwargs)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        finally:
            del self  # the traceback of an error, which the future holds, holds this frame


class Worker:
    """A thread, and its team of torch's threads, that may run on some cores alone.

    The thread starts with the first call, and again in a forked process. It ends after the calls
    that it was given when nobody has the worker any more, or at the interpreter's end.

    Args:
        cores: where the thread and its team may run.
        threads: how many threads operators use.
        name: of the thread, for people.
    """

    def __init__(self, cores: tuple[int, ...], threads: int, name: str) -> None:
        self.cores, self.threads, self.name = cores, threads, name
        self._starting = threading.Lock()
        self._calls: _Calls | None = None
        self._forks = _forks

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.cores, self.threads, self.name)

    def submit(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future:
        """Has the thread call the function in the modes of the calling thread."""
        calls = self._started()
        future = Future(calls)
        calls.put(_Call(future, Caller.of_this_thread(), function, args, kwargs))
        return future

    def send(self, job: Job) -> None:
        """Has the thread do a job that the calling thread is going to wait for."""
        calls = self._started()
        if getattr(_here, "calls", None) is calls:
            raise RuntimeError(
                f"{self.name}: this call would wait for the one that makes it, because one thread "
                "makes both; call the model itself"
            )
        calls.put(job)

    def _started(self) -> _Calls:
        if self._calls is not None and self._forks == _forks and not _ending:
            return self._calls
        if self._forks != _forks:  # a lock of the other process might be held by a thread of it
            self._starting, self._calls, self._forks = threading.Lock(), None, _forks
        with self._starting:
            if _ending:
                raise RuntimeError(
                    f"{self.name}: the interpreter is about to end; call before that"
                )
            if self._calls is None:
                calls: _Calls = queue.SimpleQueue()
                _start(calls, self.cores, self.threads, self.name)
                weakref.finalize(self, calls.put, None).atexit = False
                self._calls = calls
            return self._calls


def _start(calls: _Calls, cores: tuple[int, ...], threads: int, name: str) -> None:
    """Starts a thread; returns, or raises its error, when it is where it belongs."""
    ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_serve, args=(calls, ready, cores, threads), name=f"oxytorch {name}", daemon=True
    )
    thread.start()
    try:
        ready.result()
    except BaseException:
        calls.put(None)
        raise


def _serve(
    calls: _Calls,
    ready: concurrent.futures.Future[None],
    cores: tuple[int, ...],
    threads: int,
) -> None:
    _here.calls = _serving[threading.current_thread()] = calls
    try:
        try:
            allow(cores)
            set_own_number(threads)
            if _library.loaded and threads > 1:
                _library.functions().oxytorch_set_apart(threads)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        del ready
        while True:
            call = calls.get()
            if call is None:
                return
            call.make()
            del call  # and with it the model, its arguments and its result
    finally:
        _serving.pop(threading.current_thread(), None)


def _end_all() -> None:
    """Waits for all calls; threads of torch must not outlive the interpreter."""
    global _ending
    _ending = True
    serving = list(_serving.items())
    for _, calls in serving:
        calls.put(None)
    for thread, _ in serving:
        thread.join()


def _after_fork() -> None:
    global _forks
    _forks += 1
    _serving.clear()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
