"""Continuous batching: sequences join and leave between two tokens.

One thread runs the model. In each round it reads a part of one prompt, then all sequences that are
being written take one step together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ApiError, closing, failed, queue_full
from .lanes import LEAST_READ, Lane, Lanes
from .logs import log
from .metrics import Metrics
from .sequence import Sequence
from .waiting import FairQueue
from .worker import Worker


@dataclass(eq=False)
class _Writing:
    sequence: Sequence
    lane: Lane

    @classmethod
    def before_place(cls, sequence: Sequence) -> _Writing:
        """Of a sequence that has left the queue and gets its place next."""
        return cls(sequence, Lane())


class Engine(Worker):
    """Decodes sequences in a thread of its own, `slots` of them at a time.

    make: gives the places that they are decoded in, again after the model raised.
    slots: how many there are.
    part: most tokens of a prompt that are read between two tokens of others.
    queue: most sequences that wait.
    """

    def __init__(
        self, make: Callable[[], Lanes], slots: int, part: int, queue: int, metrics: Metrics
    ) -> None:
        super().__init__("oxytorch-engine")
        self.slots = slots
        self.limit = queue
        self._make = make
        self._lanes = make()
        self._part = max(part, LEAST_READ)
        self._metrics = metrics
        self._waiting: FairQueue[Sequence] = FairQueue()
        self._reading: _Writing | None = None
        self._writing: list[_Writing] = []

    @property
    def waiting(self) -> int:
        """How many sequences wait for a place."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many sequences have a place."""
        return len(self._writing) + (self._reading is not None)

    def submit(self, sequences: Many[Sequence]) -> None:
        """Has them written. Raises ApiError where too many wait, or after `close`."""
        with self._changed:
            if self._closed:
                raise closing()
            waiting = len(self._waiting)
            free = max(0, self.slots - self.running)
            # One request of more answers than the queue holds is taken while nothing waits.
            if waiting and waiting + len(sequences) > self.limit + free:
                raise queue_full(waiting, self._seconds_to_wait(waiting))
            for sequence in sequences:
                sequence.created = time.monotonic()
                self._waiting.put(sequence.client, sequence)
            self._changed.notify()

    def _seconds_to_wait(self, waiting: int) -> int:
        rounds = math.ceil(waiting / self.slots)
        return max(1, min(60, math.ceil(rounds * self._metrics.duration.mean)))

    def _run(self) -> None:
        with torch.inference_mode():
            while self._next():
                try:
                    self._read()
                    self._write()
                except Exception as error:
                    # It cannot be known whose fault it is: all that had a place get the error.
                    log.exception("the model raised")
                    self._fail_all(failed(error))
                    self._lanes = self._make()
        self._fail_all(closing())

    def _next(self) -> bool:
        """Waits for work, and takes out what nobody waits for; False at the end."""
        with self._changed:
            while not (self._closed or self._waiting or self._reading or self._writing):
                self._changed.wait()
            if self._closed:
                return False
            now = time.monotonic()
            for sequence in self._waiting.remove(lambda each: _is_over(each, now)):
                _end_early(sequence)
            if self._reading is None and self._waiting and len(self._writing) < self.slots:
                self._reading = _Writing.before_place(self._waiting.pop())
        for each in [*self._writing, *([self._reading] if self._reading else [])]:
            if _is_over(each.sequence, now):
                _end_early(each.sequence)
                self._leave(each)
        return True

    def _read(self) -> None:
        """Reads a part of the prompt at hand; behind its last one stands the first new token."""
        reading = self._reading
        if reading is None:
            return
        prompt = reading.sequence.prompt
        if reading.lane.is_free:
            reading.lane = self._lanes.begin(prompt)
            reading.sequence.cached = len(reading.lane.tokens)
            self._metrics.tokens.add("cached", value=reading.sequence.cached)
        start = len(reading.lane.tokens)
        end = _end_of_part(start, len(prompt), self._part) if self._lanes.in_parts else len(prompt)
        logits = self._lanes.read(reading.lane, prompt[start:end])
        self._metrics.tokens.add("prompt", value=end - start)
        if end == len(prompt):
            self._reading = None
            self._writing.append(reading)
            self._metrics.first_token.observe(time.monotonic() - reading.sequence.created)
            self._choose(reading, logits)

    def _write(self) -> None:
        """A step of all sequences that are being written."""
        writing = list(self._writing)
        if not writing:
            return
        begin = time.monotonic()
        logits = self._lanes.step(
            [each.lane for each in writing], [each.sequence.new[-1] for each in writing]
        )
        self._metrics.step.observe(time.monotonic() - begin)
        self._metrics.batch.observe(len(writing))
        for row, each in enumerate(writing):
            self._choose(each, logits[row : row + 1])

    def _choose(self, each: _Writing, logits: Tensor) -> None:
        """The next token of one sequence, whose own failure is no other's."""
        try:
            is_last = each.sequence.choose(logits)
        except RuntimeError as error:
            log.exception("no token could be chosen")
            each.sequence.end(failed(error))
            is_last = True
        self._metrics.tokens.add("new")
        if is_last:
            self._leave(each)

    def _leave(self, each: _Writing) -> None:
        if not each.lane.is_free:
            self._lanes.end(each.lane)
        if self._reading is each:
            self._reading = None
        else:
            self._writing.remove(each)

    def _fail_all(self, error: ApiError) -> None:
        with self._changed:
            mine = [*self._writing, *([self._reading] if self._reading else [])]
            self._writing, self._reading = [], None
            waiting = self._waiting.remove(lambda _: self._closed)
        for sequence in [*(each.sequence for each in mine), *waiting]:
            sequence.end(error)


def _is_over(sequence: Sequence, now: float) -> bool:
    return sequence.cancelled or now > sequence.deadline


def _end_early(sequence: Sequence) -> None:
    sequence.end(closing() if sequence.cancelled else sequence.late)


def _end_of_part(start: int, length: int, part: int) -> int:
    """Where the next part of a prompt ends, so that no part is shorter than `LEAST_READ`."""
    end = start + part
    if end >= length:
        return length
    return end if length - end >= LEAST_READ else length
