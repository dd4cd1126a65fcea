"""Calls of a model or a function on cores of their own, while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .pool import CPUPool
from .worker import Future, Worker


class Task:
    """A model or a function whose calls are made by a thread of its own, on the cores of a pool.

    `task(*args, **kwargs)` returns a `Future` at once; its `get` waits for the result, or raises
    what the call raised. Calls of one task are made one after the other, with as many of torch's
    threads as the pool has cores, and in the caller's grad mode, inference mode and autocast. The
    caller's own thread is not pinned.

    The thread starts with the first call. It ends when the task is no longer referred to, after the
    calls that it was given.

    Args:
        function: an `nn.Module`, a `ScriptModule`, or anything else that can be called.
        cpu_pool: the cores; several tasks may share them.
    """

    def __init__(self, function: Callable[..., Any], cpu_pool: CPUPool) -> None:
        if not callable(function):
            raise TypeError(
                f"Task: function: expected a model or a function, got {type(function).__name__}"
            )
        if not isinstance(cpu_pool, CPUPool):
            raise TypeError(f"Task: cpu_pool: expected a CPUPool, got {type(cpu_pool).__name__}")
        self.function, self.cpu_pool = function, cpu_pool
        self._worker = Worker(cpu_pool.core_ids, len(cpu_pool), "Task")

    def __call__(self, *args: Any, **kwargs: Any) -> Future:
        """Asks for a call; returns its future."""
        return self._worker.submit(self.function, args, kwargs)

    def run_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a call on the task's cores and waits for its result."""
        return self(*args, **kwargs).result()

    def __repr__(self) -> str:
        return f"Task({type(self.function).__name__}, {self.cpu_pool})"
