"""Dynamic batching: calls that come within a short time are made together."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from .errors import ApiError, closing, queue_full, timed_out
from .logs import log
from .metrics import Metrics
from .waiting import FairQueue
from .worker import Worker

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Item, Result]):
    item: Item
    future: Future[Result]
    since: float


class Batcher(Worker, Generic[Item, Result]):
    """Runs items in batches, in a thread of its own.

    work: the results of items, in their order.
    most: items of a batch.
    wait: seconds that the first one waits for others.
    limit: most items that wait.
    seconds: that a request may take.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        most: int,
        wait: float,
        limit: int,
        seconds: float,
        metrics: Metrics,
    ) -> None:
        super().__init__("oxytorch-batcher")
        self.most = most
        self._work = work
        self._wait = wait
        self._limit = limit
        self._seconds = seconds
        self._metrics = metrics
        self._queue: FairQueue[_Waiting[Item, Result]] = FairQueue()
        metrics.gauge("oxytorch_waiting", "Inputs that wait.", lambda: len(self._queue))

    async def results(self, items: Sequence[Item], client: str) -> list[Result]:
        """The results of items. Raises ApiError where too many wait, or it takes too long.

        A caller that is cancelled takes back what has not begun.
        """
        futures = self._put(items, client)
        try:
            every = asyncio.gather(*map(asyncio.wrap_future, futures))
            return list(await asyncio.wait_for(every, self._seconds))
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes up to Python 3.10
            raise timed_out(self._seconds) from error
        finally:
            for future in futures:
                future.cancel()

    def _put(self, items: Sequence[Item], client: str) -> list[Future[Result]]:
        with self._changed:
            if self._closed:
                raise closing()
            waiting = len(self._queue)
            # One request that is larger than the queue is taken while nothing waits.
            if waiting and waiting + len(items) > self._limit:
                rounds = math.ceil(waiting / self.most)
                raise queue_full(waiting, max(1, math.ceil(rounds * self._metrics.step.mean)))
            now = time.monotonic()
            found = [_Waiting[Item, Result](item, Future(), now) for item in items]
            for each in found:
                self._queue.put(client, each)
            self._changed.notify()
        return [each.future for each in found]

    def _run(self) -> None:
        with torch.inference_mode():
            while batch := self._next():
                self._call(batch)
        for each in self._queue.remove(lambda _: True):
            each.future.set_exception(closing())

    def _next(self) -> list[_Waiting[Item, Result]]:
        """The next batch: as many as there may be, or those that came in time; [] at the end."""
        with self._changed:
            while not self._closed:
                self._queue.remove(lambda each: each.future.cancelled())
                left = None
                if self._queue:
                    first = min(each.since for each in self._queue)
                    left = first + self._wait - time.monotonic()
                    if left <= 0 or len(self._queue) >= self.most:
                        count = min(self.most, len(self._queue))
                        return [self._queue.pop() for _ in range(count)]
                self._changed.wait(left)
        return []

    def _call(self, batch: list[_Waiting[Item, Result]]) -> None:
        begin = time.monotonic()
        taken = [each for each in batch if each.future.set_running_or_notify_cancel()]
        if not taken:
            return
        try:
            results = self._work([each.item for each in taken])
            for each, result in zip(taken, results, strict=True):
                each.future.set_result(result)
        except ApiError as error:
            self._fail(taken, error)
        except Exception as error:
            log.exception("the model raised")
            self._fail(taken, error)
        self._metrics.batch.observe(len(taken))
        self._metrics.step.observe(time.monotonic() - begin)

    def _fail(self, batch: list[_Waiting[Item, Result]], error: Exception) -> None:
        for each in batch:
            if not each.future.done():
                each.future.set_exception(error)
