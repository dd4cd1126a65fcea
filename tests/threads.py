"""Runs code in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def errors_in_threads(
    run: Callable[[_T], object], given: Iterable[_T], seconds: float = 60
) -> list[BaseException]:
    """Calls `run` with each of `given` in a thread of its own; returns what they raise.

    A thread that is still at it after `seconds` counts as a TimeoutError.
    """
    items = [*given]
    errors: list[BaseException] = []
    start = threading.Barrier(len(items))

    def work(item: _T) -> None:
        start.wait()
        try:
            run(item)
        except BaseException as error:  # pytest's outcomes among them
            errors.append(error)

    threads = [threading.Thread(target=work, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    hang = sum(thread.is_alive() for thread in threads)
    return errors + [TimeoutError(f"a thread takes more than {seconds} s")] * hang
