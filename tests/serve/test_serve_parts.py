"""Parts of the server by themselves: the queue, stops, places, an engine whose model fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from small_servers import tokenizer, wait_until
from torch import Tensor

from oxytorch.llm.sampling import Sampler
from oxytorch.serve.batcher import Batcher
from oxytorch.serve.engine import Engine
from oxytorch.serve.errors import ApiError, timed_out
from oxytorch.serve.lanes import Lane, Lanes
from oxytorch.serve.metrics import Counter, Histogram, Metrics
from oxytorch.serve.sequence import End, Event, Sequence
from oxytorch.serve.text import GrowingText
from oxytorch.serve.waiting import FairQueue


def test_clients_take_turns() -> None:
    queue = FairQueue[str]()
    for client, item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(client, client + item)
    assert len(queue) == 6
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_removed_items_leave_the_queue() -> None:
    queue = FairQueue[int]()
    for number in range(6):
        queue.put(str(number % 2), number)
    assert sorted(queue.remove(lambda number: number % 3 == 0)) == [0, 3]
    assert sorted(queue) == [1, 2, 4, 5] and len(queue) == 4


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("Once upon a time", ["upon"], "Once "),
        ("Once upon a time", ["nothing", "tim"], "Once upon a "),
        ("Once upon a time", ["upon", "Once"], ""),
        ("Once upon a time", ["timer"], "Once upon a time"),
        ("aaab", ["aab"], "a"),
        ("käse 😀 über", ["über"], "käse 😀 "),
        ("käse 😀 über", ["😀"], "käse "),
    ],
)
def test_text_ends_where_a_stop_begins(text: str, stops: list[str], wanted: str) -> None:
    inner = tokenizer()
    for tokens in (inner(text)["input_ids"], [inner(c)["input_ids"] for c in text]):
        flat = [t for each in tokens for t in (each if isinstance(each, list) else [each])]
        growing = GrowingText(inner, stops)
        found = ""
        for token in flat:
            found += growing.put(token)
            assert wanted.startswith(found) and "\ufffd" not in found
            if growing.stopped:
                break
        found += growing.end()
        assert found == wanted
        assert growing.stopped == (wanted != text)


class Counting(Lanes):
    """A model whose next token is the last one plus one; it raises for the token 66."""

    batched = True
    in_parts = True

    def __init__(self) -> None:
        self.taken = 0
        self.steps: list[int] = []
        self.parts: list[tuple[int, int]] = []  # tokens of a prompt, and the steps before them

    def begin(self, prompt: Many[int]) -> Lane:
        self.taken += 1
        return Lane(is_free=False)

    def read(self, lane: Lane, tokens: Many[int]) -> Tensor:
        lane.tokens += tokens
        self.parts.append((len(tokens), len(self.steps)))
        return self._logits([lane.tokens[-1]])

    def step(self, lanes: Many[Lane], tokens: Many[int]) -> Tensor:
        self.steps.append(len(lanes))
        time.sleep(0.001)
        for lane, token in zip(lanes, tokens, strict=True):
            lane.tokens.append(token)
        return self._logits(tokens)

    def end(self, lane: Lane) -> None:
        self.taken -= 1
        lane.is_free = True

    def _logits(self, tokens: Many[int]) -> Tensor:
        if 66 in tokens:
            raise ArithmeticError("66")
        logits = torch.zeros(len(tokens), 512)
        for row, token in enumerate(tokens):
            logits[row, (token + 1) % 512] = float("nan") if token == 77 else 1.0
        return logits


class Asked:
    """A sequence and what it was told."""

    def __init__(self, prompt: list[int], most: int, seconds: float = 60.0, **more: Any) -> None:
        self.events: list[Event] = []
        self.sequence = Sequence(
            prompt=prompt,
            most=most,
            sampler=Sampler(),
            ends=frozenset({300}),
            text=GrowingText(tokenizer(), ()),
            put=self.events.append,
            client="one",
            deadline=time.monotonic() + seconds,
            late=timed_out(seconds),
            **more,
        )

    def ended(self) -> End | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, End) else None

    def reason(self) -> str | ApiError:
        wait_until(self.ended)
        end = self.ended()
        assert end is not None
        return end.reason


@pytest.fixture
def engine() -> Any:
    found = Engine(Counting, slots=3, part=32, queue=5, metrics=Metrics())
    found.start()
    yield found
    found.close()
    assert not any(thread.name == "oxytorch-engine" for thread in threading.enumerate())


@pytest.mark.parametrize(("frequency", "wanted"), [(0.25, 3), (0.31, 9)])
def test_penalties_are_subtracted_once_and_for_each_time(frequency: float, wanted: int) -> None:
    """Token 3 came twice: 2 - (0.5 + 2 * frequency) against the 0.9 of token 9."""
    asked = Asked([3, 9], 30, presence_penalty=0.5, frequency_penalty=frequency)
    asked.sequence.new += [3, 5, 3]
    logits = torch.zeros(1, 512)
    logits[0, [3, 5, 9]] = torch.tensor([2.0, 1.0, 0.9])
    asked.sequence.choose(logits)
    assert asked.sequence.new[-1] == wanted


def test_sequences_are_written_together(engine: Engine) -> None:
    asked = [Asked([100 + 40 * i], 30) for i in range(3)]
    engine.submit([each.sequence for each in asked])
    for number, each in enumerate(asked):
        assert each.reason() == "length"
        assert each.sequence.new == list(range(101 + 40 * number, 131 + 40 * number))
    assert engine.running == engine.waiting == 0


def test_prompt_is_read_in_parts_between_the_tokens_of_others() -> None:
    lanes = Counting()
    engine = Engine(lambda: lanes, slots=2, part=40, queue=5, metrics=Metrics())
    writing, reading = Asked([100], 10**6), Asked([200] * 210, 1)
    engine.submit([writing.sequence])
    engine.start()
    wait_until(lambda: lanes.steps)
    engine.submit([reading.sequence])
    assert reading.reason() == "length"
    engine.close()
    lengths, steps = zip(*lanes.parts[1:], strict=True)
    assert lengths == (40, 40, 40, 40, 50)  # the last one is not shorter than 32
    assert steps == tuple(range(steps[0], steps[0] + 5))  # a token of the other after each


def test_end_token_ends_an_answer(engine: Engine) -> None:
    asked = Asked([290], 50)
    engine.submit([asked.sequence])
    assert asked.reason() == "stop"
    assert asked.sequence.new[-1] == 300


def test_model_that_raises_fails_its_requests_and_serves_the_next(engine: Engine) -> None:
    asked = Asked([60], 30)
    engine.submit([asked.sequence])
    reason = asked.reason()
    assert isinstance(reason, ApiError) and "ArithmeticError" in str(reason)
    after = Asked([100], 5)
    engine.submit([after.sequence])
    assert after.reason() == "length"


def test_logits_that_are_not_finite_fail_one_request(engine: Engine) -> None:
    asked, other = Asked([70], 30), Asked([200], 30)
    engine.submit([asked.sequence, other.sequence])
    reason = asked.reason()
    assert isinstance(reason, ApiError) and "finite logits" in str(reason)
    assert other.reason() == "length"


def test_cancelled_and_late_sequences_leave(engine: Engine) -> None:
    cancelled, late = Asked([100], 10**6), Asked([100], 10**6, seconds=0.1)
    engine.submit([cancelled.sequence, late.sequence])
    wait_until(lambda: engine.running == 2)
    cancelled.sequence.cancelled = True
    assert isinstance(cancelled.reason(), ApiError)
    reason = late.reason()
    assert isinstance(reason, ApiError) and reason.status == 504
    wait_until(lambda: engine.running == 0)


def test_full_queue_refuses_and_close_ends_all() -> None:
    engine = Engine(Counting, slots=1, part=32, queue=2, metrics=Metrics())
    asked = [Asked([100], 10**6) for _ in range(4)]
    engine.submit([each.sequence for each in asked[:3]])
    with pytest.raises(ApiError) as refused:
        engine.submit([asked[3].sequence])
    assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
    engine.start()
    wait_until(lambda: engine.running == 1)
    engine.close()
    for each in asked[:3]:
        reason = each.reason()
        assert isinstance(reason, ApiError) and reason.status == 503
    with pytest.raises(ApiError, match="shutting down"):
        engine.submit([asked[3].sequence])


class Batches:
    """A batcher whose results are its items, and the batches that it made."""

    def __init__(self, most: int, wait: float) -> None:
        self.made: list[list[int]] = []
        self.batcher = Batcher[int, int](self._work, most, wait, 100, 60.0, Metrics())

    def _work(self, items: Many[int]) -> Many[int]:
        self.made.append(list(items))
        return items

    def results(self, *items: int) -> tuple[list[int], float]:
        """Of one request, and the seconds that it took."""
        begin = time.monotonic()
        found = asyncio.run(self.batcher.results(items, "one"))
        return found, time.monotonic() - begin


def test_batches_wait_for_others_until_the_deadline_or_the_most() -> None:
    batches = Batches(most=3, wait=0.4)
    batches.batcher.start()
    try:
        found, seconds = batches.results(1, 2)
        assert found == [1, 2] and seconds >= 0.4
        found, seconds = batches.results(3, 4, 5)
        assert found == [3, 4, 5] and seconds < 0.4
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(batches.results, 6)
            time.sleep(0.1)
            other = pool.submit(batches.results, 7)
            assert first.result()[0] == [6] and other.result()[0] == [7]
        assert other.result()[1] < first.result()[1]
    finally:
        batches.batcher.close()
    assert batches.made == [[1, 2], [3, 4, 5], [6, 7]]


def test_batches_without_a_wait_are_what_came_during_a_call() -> None:
    batches = Batches(most=2, wait=0.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(batches.results, 1, 2, 3)
        wait_until(lambda: len(batches.batcher._queue) == 3)
        batches.batcher.start()
        assert answer.result()[0] == [1, 2, 3]
    batches.batcher.close()
    assert batches.made == [[1, 2], [3]]


def test_metrics_escape_labels_and_sum_buckets() -> None:
    counter = Counter("c", "", ("path",))
    counter.add('a"b\n')
    assert list(counter.lines()) == ['c{path="a\\"b\\n"} 1']
    histogram = Histogram("h", "", (1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    assert list(histogram.lines())[:3] == [
        'h_bucket{le="1"} 2',
        'h_bucket{le="2"} 3',
        'h_bucket{le="+Inf"} 4',
    ]
