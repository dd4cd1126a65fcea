"""Whether a layer made faster beats torch's own one on this machine, by timing both once.

oneDNN's products are not faster everywhere: they may take fewer threads than there are, upon which
libgomp ends the others and makes new ones for the next operator, and a kind of convolution may have
no fast kernel. So layers of each size are timed beside torch's before they are packed, in turns and
among operators that use all threads, and the answer is kept for the process. Layers of about one
size share it.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._library import functions_in_known_torch
from ..core.placement import trim_heap
from . import learnt

TIMED = True
"""Whether layers are timed; else every one is packed that can be, which tests want: times are taken
as good, whatever they are."""
USUAL_ROWS, MOST_ROWS = (1, 16, 64, 256), 512
"""Rows of the inputs that are timed: where no sample tells, and at most."""
MOST_WORK = 1 << 30
"""Products of a call that is timed: layers too large for it are timed with fewer rows."""
ROUNDS = 11
"""Turns of both, whose median decides: threads that are created again cost time in most turns, not
in all."""
FEW_ROUNDS = 7
"""Turns whose lower quartiles are compared where differences are large."""
FEWEST_ROUNDS, CLEAR_GAIN, CLEAR_LOSS = 3, 0.8, 1.25
"""Turns after which times decide that say the same each time, by so much."""
CLEAR_ROUNDS, HOPELESS = 2, 1.25
"""Turns after which one of several calls counts as the fastest if it was so by as much each
time; a call that takes so many times as long is timed no more."""
OUTRIGHT = 2.0
"""Or that took so many times as long in the first turn and in that before, which fills caches."""
STEADY = 1.05
"""Or of which those that decide agree, the largest at most this many times the smallest: more turns
would not change it."""
CALLS, LONG = 3, 1e-3
"""Calls of a turn, for calls up to so many seconds; longer ones are their own mean."""
GAIN = 0.95
"""A layer is packed where it takes at most this part of torch's time."""
NO_LOSS = 1.04
"""And at most this part of it for each larger input, where its size is not known."""
MOST_BESIDE_LOSS = 1.25
"""And with few rows, where torch's own layer runs behind a look at the rows: products are a part of
a model's time there, and single rows a part of its calls."""
SMALL = 256 << 10
"""Elements of a weight below which the way in which a linear layer is called takes a part of its
time."""
COLD = 1e-6
"""Seconds that the Python around a packed layer takes longer inside a model than here, where it has
just run."""
NO_TIME = 1e-7
"""Seconds that every call takes at least: on a busy machine what is subtracted can take longer."""
ENOUGH, LONGEST = 0.05, 0.15
"""Seconds after which no further round begins: where there were the fewest rounds, and at all."""
DRAWN = 1 << 16
"""Numbers that are drawn: times do not depend on more, which take longer than the calls."""
HEAP, BLOCK = 32 << 20, 96 << 10
"""Bytes of the heap that stay with the process while calls are timed, and of the blocks that they
are taken in: blocks below 128 KiB lie in the heap, larger ones may be mapped."""

Product = Callable[[Tensor], Tensor]
"""Of an input with a weight."""
Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""Torch's own layer, and the packed one, each with the Python around its operator."""


def rows_of(size: Sequence[int] | None, elements: int = 1) -> tuple[int, ...]:
    """The rows to time, more and more, for inputs of a size, or of a size that is not known.

    elements: those of the weight that each row is multiplied with.
    """
    most = min(MOST_ROWS, max(1, MOST_WORK // max(elements, 1)))
    given = (max(1, math.prod(size[:-1])),) if size else USUAL_ROWS
    return tuple(dict.fromkeys(min(rows, most) for rows in given))


def fewer_rows(rows: int) -> tuple[int, ...]:
    """The usual rows that are fewer than a sample's."""
    return tuple(usual for usual in USUAL_ROWS[:2] if usual < rows)


def about(number: int) -> tuple[int, bool]:
    """What numbers of about one size have in common: those that vectors divide, and others."""
    if number <= 64:
        return number, True
    step = 1 << (number.bit_length() - 3)
    return number // step * step, number % 16 == 0


def key_of_linear(weight: Tensor, transposed: bool, dims: int | None) -> tuple[Any, ...]:
    """What the times of a linear layer depend on, besides rows.

    dims: of its input; None where they are not known.
    """
    outputs, width = reversed(weight.shape) if transposed else weight.shape
    return ("linear", about(outputs), about(width), weight.dtype, transposed, dims)


def numbers(*size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers in [0, 1), which leave torch's generator of random numbers as it is; many are few
    again and again."""
    count = math.prod(size)
    drawn = torch.rand(
        min(count, DRAWN), generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(dtype)
    return drawn.repeat(-(-count // DRAWN))[:count].view(size)


def input_of(rows: int, width: int, size: Sequence[int] | None) -> Tensor:
    """An input of so many rows, with the dimensions that one of `size` has, or three."""
    dims = 3 if size is None else len(size)
    return numbers(width) if dims == 1 else numbers(*[1] * (dims - 2), rows, width)


def calls_of(
    products: Callable[[], Sequence[Product]],
    width: int,
    size: Sequence[int] | None,
    dtype: torch.dtype,
) -> Callable[[int], Calls]:
    """What gives the calls of two products on so many rows, for `first_win`.

    products: makes torch's own and the packed one; called, once, where times are not known yet.
    width: of a row.
    size: see `input_of`.
    """
    made = cache(products)

    def calls(rows: int) -> Calls:
        given = cache(lambda: input_of(rows, width, size).to(dtype))
        return lambda: made()[0](given()), lambda: made()[1](given())

    return calls


_known: dict[Hashable, learnt.Times] = {}
"""Ratios and seconds, by what they depend on."""
_learning = 0
_lock = threading.RLock()  # what is timed may ask for other times when it is made


_heap_users = 0
_heap_end: Tensor | None = None


@contextmanager
def steady_heap() -> Iterator[None]:
    """Times that are taken in this context do not depend on what else lies in the heap.

    glibc gives memory at the end of the heap back to the system, and who takes it again waits for
    its pages: one and the same call may take twice as long, for as long as the process lives. A
    block at the end keeps what is freed below it; at last all that is free goes back.
    """
    global _heap_users, _heap_end
    _set_threads_apart()
    with _lock:
        _heap_users += 1
    try:
        yield
    finally:
        with _lock:
            _heap_users -= 1
            if not _heap_users:
                _heap_end = None
                trim_heap()


def _set_threads_apart() -> None:
    """Have torch's threads begin on processors of their own, where they do not yet: calls take as
    long as ticks of the system else, for the first tenth of a second."""
    library = functions_in_known_torch()
    if library is not None:
        library.oxytorch_set_apart(torch.get_num_threads())


def hold_heap() -> None:
    """Called before times are taken."""
    global _heap_end
    if _heap_users and _heap_end is None:
        blocks = [torch.zeros(BLOCK, dtype=torch.uint8, device="cpu") for _ in range(HEAP // BLOCK)]
        _heap_end = blocks[-1]


@contextmanager
def learning() -> Iterator[None]:
    """All times are measured again in this context, and then kept for later processes."""
    global _learning
    with _lock:
        _learning += 1
        _known.clear()
    try:
        yield
    finally:
        with _lock:
            _learning -= 1
            learnt.keep(_known)


def _times_of(key: Hashable, take: Callable[[], learnt.Times]) -> learnt.Times:
    """What is known of a key: of this process, of an earlier one, or from now on."""
    if key not in _known:
        found = None if _learning else learnt.recall(key)
        _known[key] = take() if found is None else found
    return _known[key]


def first_win(key: Hashable, sizes: Sequence[Calls], gain: float = GAIN) -> int | None:
    """The number of the size from which on a packed layer is faster than torch's own, or None.

    key: what the times depend on, besides threads.
    sizes: both layers, on larger and larger inputs.
    gain: the part of torch's time that it takes at most, for one of them.
    """
    first, wins = None, False
    for number in reversed(range(len(sizes))):
        ratio = _ratio_of((key, number), sizes[number])
        if ratio > NO_LOSS:
            break
        first, wins = number, wins or ratio <= gain
    return first if wins else None


def wins_of(key: Hashable, sizes: Sequence[Calls]) -> int:
    """On how many of the smaller sizes a packed layer is faster than what is taken else; all, where
    it is nowhere slower.

    key: what the times depend on, besides threads.
    sizes: both layers, on larger and larger inputs.
    """
    ratios = []
    for number, both in enumerate(sizes):
        ratios.append(_ratio_of((key, number), both))
        if ratios[-1] > (GAIN if not number else NO_LOSS):
            break
    if ratios[-1] <= NO_LOSS and len(ratios) == len(sizes):
        return len(sizes)
    wins = [number for number, ratio in enumerate(ratios, 1) if ratio <= GAIN]
    return max(wins, default=0)


def may_stay_beside(key: Hashable, both: Calls) -> bool:
    """Whether torch's own layer beside a packed one, for few rows, is about as fast as alone.

    key: what the times depend on, besides threads.
    """
    return _ratio_of(("beside", key), both) <= MOST_BESIDE_LOSS


def seconds_of(key: Hashable, make: Callable[[], Sequence[Callable[[], Any]]]) -> tuple[float, ...]:
    """The usual times of several calls, which `make` gives: what others do on the machine aside.

    key: what they depend on, besides threads.
    """
    key = ("seconds", key, torch.get_num_threads())
    with _lock, torch.inference_mode():
        return _times_of(key, lambda: _quartiles(make()))


def _quartiles(calls: Sequence[Callable[[], Any]]) -> tuple[float, ...]:
    hold_heap()
    between = torch.zeros(torch.get_num_threads() << 16, device="cpu")
    taken: list[list[float]] = [[] for _ in calls]
    before = [0.0] * len(calls)
    timed = [*range(len(calls))]
    began = time.perf_counter()
    least = _least(between, 1, math.inf)
    for turn in range(FEW_ROUNDS + 1):
        least = _least(between, 1, least)
        for number in timed:
            found = max(_seconds(calls[number], between, 1) - least, NO_TIME)
            if turn:
                taken[number].append(found)
            else:  # which fills caches
                before[number] = found
        if turn == 1:
            both = [sorted((first, *own)) for first, own in zip(before, taken, strict=True)]
            timed = [n for n in timed if both[n][0] <= OUTRIGHT * min(b[-1] for b in both)]
            if len(timed) < 2 <= len(calls):
                break
        if turn < CLEAR_ROUNDS:
            continue
        timed = [n for n in timed if min(taken[n]) <= HOPELESS * min(map(max, taken))]
        if len(timed) < 2 or _is_settled([taken[n] for n in timed]):
            break
        if _is_over(turn, time.perf_counter() - began):
            break
    return tuple(sorted(each)[len(each) // 4] for each in taken)


def _is_settled(taken: Sequence[Sequence[float]]) -> bool:
    """Whether more turns would tell no more: one call is faster than the others each time, or the
    times of each agree."""
    first, *others = sorted(taken, key=min)
    if max(first) <= CLEAR_GAIN * min(map(min, others)):
        return True
    return all(_are_steady(sorted(each)[:2]) for each in taken)


def _is_over(turns: int, seconds: float) -> bool:
    """Whether no further turn begins after so many, which took so long."""
    return seconds > (LONGEST if turns < FEWEST_ROUNDS else ENOUGH)


def _are_steady(found: Sequence[float]) -> bool:
    """Whether times, or their ratios, agree with each other."""
    return max(found) <= STEADY * min(found)


def _middle(found: Sequence[float]) -> list[float]:
    """Ratios without the quarters of the smallest and of the largest, which chance may make."""
    quarter = len(found) // 4
    return sorted(found)[quarter : len(found) - quarter]


def _ratio_of(key: Hashable, both: Calls) -> float:
    """The packed layer's time divided by torch's."""
    plain, packed = both
    key = (key, torch.get_num_threads())
    with _lock, torch.inference_mode():
        if not TIMED:
            plain(), packed()
            return 0.0
        return _times_of(key, lambda: (_ratio(plain, packed),))[0]


def _ratio(plain: Callable[[], Tensor], packed: Callable[[], Tensor]) -> float:
    """The packed layer's time divided by torch's: the median of turns."""
    hold_heap()
    between = torch.zeros(
        torch.get_num_threads() << 16, device="cpu"
    )  # large enough for all threads
    ratios: list[float] = []
    calls, least = 1, math.inf
    began = time.perf_counter()
    for turn in range(ROUNDS + 1):
        least = _least(between, calls, least)
        ours, own = _seconds(packed, between, calls), _seconds(plain, between, calls)
        if turn:  # the first turn fills caches
            ratios.append((max(ours - least, 0.0) + COLD) / max(own - least, NO_TIME))
        elif max(ours, own) < LONG:
            calls = CALLS
        middle = _middle(ratios)
        is_clear = max(middle, default=1) < CLEAR_GAIN or min(middle, default=1) > CLEAR_LOSS
        if turn >= FEWEST_ROUNDS and (is_clear or _are_steady(middle)):
            break
        if turn and _is_over(turn, time.perf_counter() - began):
            break
    return statistics.median(ratios)


def _least(between: Tensor, calls: int, before: float) -> float:
    """The least time of the operator after a call, of those before and one more: on a busy machine
    some take longer than a call with it, and would make calls of no time."""
    return min(before, _seconds(_nothing, between, calls))


def _nothing() -> None:
    return None


def _seconds(run: Callable[[], Any], between: Tensor, calls: int) -> float:
    """Of a call and the operator after it, which finds the threads that the call left."""
    between.add_(1)
    began = time.perf_counter()
    for _ in range(calls):
        run()
        between.add_(1)
    return (time.perf_counter() - began) / calls
