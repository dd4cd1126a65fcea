"""`with pin(pool):` runs the block on the pool's cores."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .pool import CPUPool
from .threads import allow, set_own_number, team

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Before(NamedTuple):
    """What a block found: this thread's cores, those of its team's threads, and their number."""

    cores: set[int]
    of_threads: dict[int, set[int]]
    threads: int


class pin:
    """Runs a block, or the calls of a function that it decorates, on the cores of a pool.

    Operators that the calling thread calls meanwhile use as many threads as the pool has cores.
    All of them may run on any of the pool's cores, and on no other. Other threads are left alone,
    and so is torch's number of threads for new ones. At the end, after an exception too, the thread
    has the cores and the number of threads that it had.

    Blocks can be nested, and one `pin` can be used many times and by several threads.
    """

    def __init__(self, cpu_pool: CPUPool) -> None:
        if not isinstance(cpu_pool, CPUPool):
            raise TypeError(f"pin: cpu_pool: expected a CPUPool, got {type(cpu_pool).__name__}")
        self.cpu_pool = cpu_pool
        self._own = threading.local()

    def __enter__(self) -> CPUPool:
        before = _Before(os.sched_getaffinity(0), {}, torch.get_num_threads())
        try:
            _enter(self.cpu_pool, before)
        except BaseException:
            _leave(before)
            raise
        vars(self._own).setdefault("blocks", []).append(before)
        return self.cpu_pool

    def __exit__(self, *error: object) -> None:
        _leave(self._own.blocks.pop())

    def __call__(self, function: _Function) -> _Function:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"pin: expected a plain function, got {function!r}, whose body runs after the "
                "call; use `with pin(...)` inside"
            )

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(_Function, run)


def _enter(pool: CPUPool, before: _Before) -> None:
    allow(pool.core_ids)  # first: threads that are made from here on have this thread's cores
    if len(pool) != before.threads:
        set_own_number(len(pool))
    for thread in team():
        cores = os.sched_getaffinity(thread)
        if cores != set(pool.core_ids):  # else it was made just now, or may run there anyway
            before.of_threads[thread] = cores
            allow(pool.core_ids, [thread])


def _leave(before: _Before) -> None:
    allow(before.cores)
    for thread in team():  # as it is now: OpenMP may have ended threads, and made others
        allow(before.of_threads.get(thread, before.cores), [thread])
    if torch.get_num_threads() != before.threads:
        set_own_number(before.threads)
