"""`pin`: where a block's threads run, how many there are, and that all is as before afterwards."""

from __future__ import annotations

import os
import re
import threading

import pytest
import torch
from thread_states import CORES, cores_of_team, needs_two_cores, place

from oxytorch.runtime import CPUPool, pin
from oxytorch.runtime.threads import in_new_thread, set_own_number, team
from threads import errors_in_threads

FIRST = CPUPool(CORES[:1])
LAST = CPUPool(CORES[-1:])
ALL = CPUPool(CORES)


def test_block_has_the_cores_and_the_threads_of_its_pool() -> None:
    before = place()
    with pin(FIRST) as pool:
        assert pool is FIRST
        assert place() == ({CORES[0]}, 1)
        assert cores_of_team() == [{CORES[0]}]
    assert place() == before


@needs_two_cores
def test_team_that_exists_moves_and_comes_back() -> None:
    torch.randn(1 << 18).exp_()
    existing = {thread: os.sched_getaffinity(thread) for thread in team()}
    size = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = set(team())
        with pin(CPUPool(CORES[:2])):
            assert cores_of_team() == [set(CORES[:2])] * 2
            assert set(team()) == two
        assert cores_of_team() == [set(CORES)] * 2
    finally:
        torch.set_num_threads(size)
    for thread in team():
        assert os.sched_getaffinity(thread) == existing.get(thread, set(CORES))


@needs_two_cores
def test_threads_that_are_made_inside_come_back() -> None:
    """OpenMP ends threads of a team that grows smaller, and makes others when it grows again."""

    def check() -> None:
        torch.set_num_threads(2)
        team()
        with pin(CPUPool(CORES[:2])):
            for threads in (1, 4, 2):
                torch.set_num_threads(threads)
                assert cores_of_team() == [set(CORES[:2])] * threads
        assert torch.get_num_threads() == 2
        assert cores_of_team() == [set(CORES)] * 2

    number = in_new_thread(torch.get_num_threads)
    assert errors_in_threads(lambda _: check(), [0]) == []
    torch.set_num_threads(number)


@needs_two_cores
def test_threads_with_cores_of_their_own_get_them_back() -> None:
    def check() -> None:
        torch.set_num_threads(2)
        first, second = team()
        os.sched_setaffinity(first, {CORES[0]})
        os.sched_setaffinity(second, {CORES[1]})
        with pin(ALL):
            assert cores_of_team() == [set(CORES)] * len(CORES)
        torch.set_num_threads(2)
        assert os.sched_getaffinity(first) == {CORES[0]}
        if len(CORES) == 2:
            assert os.sched_getaffinity(second) == {CORES[1]}

    number = torch.get_num_threads()
    assert errors_in_threads(lambda _: check(), [0]) == []
    torch.set_num_threads(number)


def test_exception_leaves_all_as_before() -> None:
    before = place()
    with pytest.raises(KeyError), pin(FIRST):
        raise KeyError("inside")
    assert place() == before


def test_number_of_threads_set_inside_does_not_outlive_the_block() -> None:
    before = place()
    default = in_new_thread(torch.get_num_threads)
    with pin(FIRST):
        torch.set_num_threads(3)
    assert place() == before
    torch.set_num_threads(default)  # the user's own call set the number for new threads


@needs_two_cores
def test_blocks_can_be_nested() -> None:
    before = place()
    outer = pin(FIRST)
    with outer:
        with pin(LAST):
            assert place() == ({CORES[-1]}, 1)
            with outer:
                assert place() == ({CORES[0]}, 1)
            assert place() == ({CORES[-1]}, 1)
        assert place() == ({CORES[0]}, 1)
    assert place() == before


def test_decorator_pins_each_call() -> None:
    @pin(FIRST)
    def inside(value: int, *, more: int = 0) -> tuple[object, int]:
        """Its docstring."""
        return place(), value + more

    before = place()
    assert inside(1, more=2) == (({CORES[0]}, 1), 3)
    assert inside.__doc__ == "Its docstring." and inside.__name__ == "inside"
    assert place() == before


def test_decorator_calls_itself() -> None:
    @pin(FIRST)
    def countdown(number: int) -> int:
        return countdown(number - 1) if number else len(os.sched_getaffinity(0))

    before = place()
    assert countdown(3) == 1
    assert place() == before


def test_decorator_refuses_what_runs_after_the_call() -> None:
    async def later() -> None: ...

    def items() -> object:
        yield 1

    for function in (later, items):
        with pytest.raises(TypeError, match="use `with pin"):
            pin(FIRST)(function)


def test_pin_refuses_what_is_no_pool() -> None:
    with pytest.raises(TypeError, match="cpu_pool: expected a CPUPool, got list"):
        pin([0])  # type: ignore[arg-type]


def libraries() -> set[int]:
    """How many threads torch, OpenMP and MKL would use in the calling thread."""
    shown = torch.__config__.parallel_info()
    return {int(number) for number in re.findall(r"get_(?:num|max)_threads\(\) : (\d+)", shown)}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("by_torch", [False, True])
def test_number_of_a_thread_is_its_own(
    threads: int, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr("oxytorch.runtime.threads._numbers_of_a_thread", lambda: ())
    here, new = libraries(), in_new_thread(torch.get_num_threads)

    def check() -> None:
        set_own_number(threads)
        assert libraries() == {threads}
        assert torch.get_num_threads() == threads == len(team())

    assert errors_in_threads(lambda _: check(), [0]) == []
    assert libraries() == here and in_new_thread(torch.get_num_threads) == new


@needs_two_cores
def test_other_threads_are_left_alone() -> None:
    pinned, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with pin(FIRST):
            pinned.set()
            go_on.wait(20)

    holder = threading.Thread(target=hold)
    before = place(), in_new_thread(torch.get_num_threads)
    holder.start()
    pinned.wait(20)
    seen = place(), in_new_thread(torch.get_num_threads)
    go_on.set()
    holder.join()
    assert seen == before


def test_one_pin_serves_many_threads() -> None:
    shared = pin(FIRST)

    def check(_: int) -> None:
        before = place()
        for _ in range(5):
            with shared:
                assert place() == ({CORES[0]}, 1)
        assert place() == before

    assert errors_in_threads(check, range(6)) == []


def test_cores_that_went_away_are_an_error_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = CPUPool()
    pool.core_ids = (4095,)  # as after a smaller cpuset
    before = place()
    with pytest.raises(RuntimeError, match=r"cannot run on cores \[4095\].*make the pool again"):
        pin(pool).__enter__()
    assert place() == before


def test_results_are_those_of_another_number_of_threads() -> None:
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    expected = torch.nn.functional.linear(x, weight)
    with pin(FIRST):
        torch.testing.assert_close(torch.nn.functional.linear(x, weight), expected)
