"""Random programs on the fake source, each call compared with a simple model of memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from oxytorch.memory import OutOfMemoryError
from oxytorch.memory._core import POLICIES, Allocator, Fake

MiB = 1 << 20
PAGE = 2 * MiB
SIZES = (1, 700, 40_000, 600_000, MiB, 3 * MiB, 11 * MiB, 30 * MiB, 70 * MiB)


@dataclass
class Live:
    address: int
    asked: int
    size: int
    stream: int
    users: set[int] = field(default_factory=set)


class Model:
    """What of the memory is in use, by physical bytes."""

    def __init__(self, policy: str, seed: int, *, event_delay: int = -1) -> None:
        self.fake = Fake(512 * MiB, event_delay=event_delay)
        self.allocator = Allocator(self.fake.table, policy)
        self.maps = policy != "native"
        self.random = random.Random(seed)
        self.live: list[Live] = []
        # Of each page: parts in use, and parts last used by a stream, with the waits so far.
        self.used: dict[int, list[tuple[int, int, int]]] = {}
        self.freed: dict[int, list[tuple[int, int, set[int], int]]] = {}
        self.pending: list[tuple[Live, int]] = []
        self.order = event_delay < 0

    def parts(self, block: Live) -> list[tuple[int, int, int]]:
        """Page, first and last byte of each physical piece of a block."""
        found = []
        at, end = block.address, block.address + block.size
        while at < end:
            stop = min(end, at - at % PAGE + PAGE)
            page = self.fake.page(at) if self.maps else at // PAGE
            assert page, "a live block has addresses without memory"
            found.append((page, at % PAGE, at % PAGE + stop - at))
            at = stop
        return found

    def allocate(self) -> None:
        asked = int(self.random.choice(SIZES) * self.random.uniform(0.5, 1.5)) + 1
        stream = self.random.choice((0, 0, 0, 8, 16))
        before = self.allocator.statistics(0)
        try:
            address = self.allocator.allocate(0, asked, stream)
        except OutOfMemoryError as error:
            assert "Tried to allocate" in str(error)
            self.compare_peaks(before)
            self.free_some(len(self.live) // 2)
            return
        begin, size = self.allocator.find(address + asked - 1)
        assert begin == address
        assert size >= asked
        assert address % 512 == 0
        block = Live(address, asked, size, stream)
        waits = self.fake.counts()["wait"]
        for page, first, last in self.parts(block):
            for other_first, other_last, owner in self.used.get(page, ()):
                assert last <= other_first or other_last <= first, f"overlaps block {owner:#x}"
            for other_first, other_last, streams, waits_then in self.freed.get(page, ()):
                if self.order and first < other_last and other_first < last:
                    assert streams <= {stream} or waits > waits_then, "reused too early"
            self.used.setdefault(page, []).append((first, last, address))
        self.live.append(block)

    def free(self) -> None:
        if not self.live:
            return
        block = self.live.pop(self.random.randrange(len(self.live)))
        waits = self.fake.counts()["wait"]
        for page, first, last in self.parts(block):
            self.used[page].remove((first, last, block.address))
            old = self.freed.get(page, [])
            kept = [part for part in old if part[3] >= waits]
            self.freed[page] = [*kept, (first, last, {block.stream} | block.users, waits)]
        self.allocator.free(block.address)

    def free_some(self, count: int) -> None:
        for _ in range(count):
            self.free()

    def record_stream(self) -> None:
        if self.live:
            block = self.random.choice(self.live)
            stream = self.random.choice((0, 8, 24))
            self.allocator.record_stream(block.address, stream)
            block.users.add(stream)

    def limit(self) -> None:
        self.allocator.set_limit(0, self.random.choice((0, 0, 200 * MiB, 400 * MiB)))

    def compare_peaks(self, before: dict[str, int]) -> None:
        """A request that failed leaves none, but of what is still held."""
        after = self.allocator.statistics(0)
        for key, value in before.items():
            if key.endswith(".peak"):
                assert after[key] == max(value, after[key.replace(".peak", ".current")]), key

    def compare(self) -> None:
        stats = self.allocator.statistics(0)
        counts = self.fake.counts()
        assert counts["mistakes"] == 0, self.fake.mistake()
        assert stats["allocation.all.current"] == len(self.live)
        assert stats["allocated_bytes.all.current"] == sum(block.size for block in self.live)
        assert stats["requested_bytes.all.current"] == sum(block.asked for block in self.live)
        assert stats["reserved_bytes.all.current"] == counts["held_bytes"]
        assert stats["active_bytes.all.current"] >= stats["allocated_bytes.all.current"]
        for kind in ("allocation", "active", "segment", "inactive_split"):
            names = [f"{kind}.{pool}.current" for pool in ("small_pool", "large_pool", "all")]
            small, large, both = (stats[name] for name in names)
            assert small >= 0
            assert large >= 0
            assert small + large == both
        for key, value in stats.items():
            if key.endswith(".current"):
                assert value <= stats[key.replace(".current", ".peak")]
        segments = self.allocator.snapshot(0)
        blocks = [block for segment in segments for block in segment["blocks"]]
        states = [block["state"] for block in blocks]
        assert states.count("active_allocated") == len(self.live)
        size = sum(block["size"] for block in blocks if block["state"] != "inactive")
        assert size == stats["active_bytes.all.current"]
        for kind in ("small", "large"):
            count = sum(segment["segment_type"] == kind for segment in segments)
            assert stats[f"segment.{kind}_pool.current"] == count
        for segment in segments:
            at = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == at, "blocks leave a gap in their segment"
                at += block["size"]
            assert at == segment["address"] + segment["total_size"]

    def run(self, steps: int) -> None:
        choices = [self.allocate] * 10 + [self.free] * 9 + [self.record_stream] * 2
        for step in range(steps):
            self.random.choice(choices)()
            if self.random.random() < 0.01:
                self.allocator.empty_cache(0)
            if self.random.random() < 0.01:
                self.limit()
            if step % 40 == 0:
                self.compare()

    def end(self) -> None:
        """All is freed and comes back."""
        self.compare()
        self.free_some(len(self.live))
        self.allocator.set_limit(0, 0)
        self.allocator.empty_cache(0)
        self.compare()
        assert self.fake.counts()["held_bytes"] == 0
        assert self.fake.counts()["mapped_bytes"] == 0
        self.allocator.close()
        assert self.fake.mistake() == ""
        self.fake.end()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("event_delay", (-1, 0, 30))
@pytest.mark.parametrize("policy", POLICIES)
def test_allocator_does_what_a_model_of_memory_allows(
    policy: str, event_delay: int, seed: int
) -> None:
    model = Model(policy, seed, event_delay=event_delay)
    model.run(600)
    model.end()


@pytest.mark.parametrize("every", (1, 2, 3, 5, 7, 13, 40))
@pytest.mark.parametrize("policy", POLICIES)
def test_allocator_survives_a_source_that_fails(policy: str, every: int) -> None:
    model = Model(policy, every)
    model.run(60)
    model.fake.fail_every(every)
    model.run(300)
    model.fake.fail_every(0)
    model.run(100)
    model.end()


def test_model_notices_an_overlap() -> None:
    model = Model("mapped", 0)
    model.allocate()
    # The model does not know of this.
    model.allocator.free(model.live[0].address)
    model.random.seed(0)
    with pytest.raises(AssertionError, match="overlaps"):
        model.allocate()
