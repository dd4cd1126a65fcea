"""Time the passes on the user's own input and keep those that win."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import _garbage
from ..rewriting import measure
from ..rewriting.copies import copied
from .context import Context
from .passes import DEFAULT
from .sample import Sample

Run = Callable[[], Any]
"""A call of a model on the sample."""

ROUNDS = 9
"""Paired rounds per comparison; the median of their ratios decides."""
FIRST_ROUNDS = 3
"""Rounds after which a model that is no slower than it was is believed to be so, if calls are not
short."""
CLEAR_ROUNDS, HOPELESS = 2, 1.5
"""Rounds after which it is believed to be faster where it gained in each, and after which one that
took so many times as long in each is timed no more."""
LONGEST = 3.0
"""Seconds that further rounds may take, where the first ones say that it is slower."""
SHORT = 0.05
"""Seconds of two models' calls together up to which calls are short: each is timed after one that
is not."""
ENOUGH = 0.05
"""Seconds of rounds of short calls, before which they are not believed."""
LOSS = 1.03
"""Ratio above which a model is slower than it was."""
GAIN = 0.98
"""A pass is dropped only where the model without it takes at most this fraction of the time; a
model that takes at most this fraction has gained."""


def choose(
    model: nn.Module,
    dtype: Any,
    sample: Sample,
    names: tuple[str, ...],
    always: tuple[str, ...] = (),
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the passes worth running, and the times that say so.

    always: those that are run whether they win or not.

    Starts from all passes together, since some pay only in company, then tries to do without each;
    at last the winner meets the original. Passes that are no default are tried the other way round:
    they are added where they win. Weights are shared between the candidates as far as they are not
    packed.
    """

    def build(chosen: tuple[str, ...]) -> nn.Module:
        return _built(model, dtype, sample, chosen)

    lines: list[tuple[str, str]] = []
    chosen = tuple(name for name in names if name in DEFAULT)
    best = build(chosen)
    for name in names:
        if name in always or (name == "cast" and dtype is None):
            continue
        added = name not in DEFAULT
        if not added and not _differs(best, name):
            continue
        other = (*chosen, name) if added else tuple(n for n in chosen if n != name)
        candidate = build(other)
        if added and not _differs(candidate, name):
            continue
        ratio, before, after = _paired(best, candidate, sample)
        keep = ratio <= GAIN
        lines.append((
            f"{'with' if added else 'without'} {name}",
            f"{before * 1e3:.2f} -> {after * 1e3:.2f} ms, ratio {ratio:.3f}: "
            + ("taken" if keep else "not taken"),
        ))  # fmt: skip
        if keep:
            best, chosen = candidate, other
        del candidate
    first = build(always) if always else model
    ratio, before, after = _paired(first, best, sample)
    lines.append(("original -> optimized", f"{before * 1e3:.2f} -> {after * 1e3:.2f} ms"))
    if ratio > 1.0:
        lines.append(("kept the original", f"ratio {ratio:.3f}: nothing won"))
        chosen = always
    return chosen, {"passes": list(chosen), "ratio": ratio, "lines": lines}


def keep_fastest(
    model: nn.Module,
    result: nn.Module,
    dtype: Any,
    sample: Sample,
    names: tuple[str, ...],
    separate: Callable[[nn.Module], None],
) -> tuple[nn.Module, dict[str, Any] | None]:
    """Run the passes on `result`, a copy of `model`, or on another one, and return what is fastest
    on the sample; with the times that speak against passes that were left out.

    A program has to be as fast as what the other passes make, and the result as fast as the model
    was, or is in another dtype alone, though each of its layers is faster by itself.
    """
    from . import _optimize_in_place

    if not measure.TIMED:
        _optimize_in_place(result, dtype, sample, names, separate)
        return result, None
    others = tuple(name for name in names if name != "program")
    seen, program = _made(model, result, dtype, sample, names, separate)
    first, beside, warm = _first(model, dtype, sample, seen, program)
    candidates = [result] if program is None else [result, program]
    runs = [first, *(_call(each, sample) for each in candidates)]
    if program is not None:
        warm = (*warm, len(runs) - 1)  # its first run was compared
    turns = _turns(runs, sample, [*beside, *candidates], warm)
    tuned = None
    if program is not None:
        ratio, before, after = _of_turns(turns, 1, 2)
        if ratio <= LOSS:
            result = program
        else:
            turns, names = [turn[:2] for turn in turns], others
            line = f"{before * 1e3:.2f} -> {after * 1e3:.2f} ms, ratio {ratio:.3f}: not taken"
            tuned = {"passes": [*others], "ratio": ratio, "lines": [("with program", line)]}
    if _of_turns(turns, 0, -1)[0] <= LOSS:
        return result, tuned
    names, tuned = choose(model, dtype, sample, names, () if dtype is None else ("cast",))
    result = copied(model)
    _optimize_in_place(result, dtype, sample, names, separate)
    return result, tuned


def _made(
    model: nn.Module,
    result: nn.Module,
    dtype: Any,
    sample: Sample,
    names: tuple[str, ...],
    separate: Callable[[nn.Module], None],
) -> tuple[Context, nn.Module | None]:
    """Run the passes but `program` on `result`, and that one on another copy of the model.

    Returns what is known of the model, and that copy, if the pass is wanted and made a program.
    """
    from . import _optimize_in_place, explain

    others = tuple(name for name in names if name != "program")
    program = None if others == names else copied(model)
    made: list[bool] = []

    def capture(seen: Context) -> bool:
        """Make the program of the model, and return whether there is one."""
        assert program is not None
        _optimize_in_place(program, dtype, sample, names, separate, seen, ("program",))
        made.append(_differs(program, "program"))
        return made[0]

    is_first = program is not None and dtype is None  # else it is known later what is converted
    confirm = capture if is_first else None
    seen = _optimize_in_place(result, dtype, sample, others, separate, confirm=confirm)
    if program is not None and not (made or [capture(seen)])[0]:
        report = explain(result)
        report.passes, report.entries[:0] = [*names], explain(program).entries
        program = None
    return seen, program


def _first(
    model: nn.Module, dtype: Any, sample: Sample, seen: Context, program: nn.Module | None
) -> tuple[Run, list[nn.Module], tuple[int, ...]]:
    """A call of the model as it was, or in another dtype alone, the modules that it runs, and the
    number 0 if such calls were made before.

    program: the model as a program, whose own code is that of the model in the other dtype.
    """
    if dtype is None:
        return _call(model, sample), [model], (0,)
    if program is not None and not seen.packing_decides:
        own = program.__dict__["forward"].forward
        return lambda: own(*sample.args, **sample.kwargs), [], (0,)
    converted = _built(model, dtype, sample, ("cast",), seen)
    return _call(converted, sample), [converted], ()


def _call(model: nn.Module, sample: Sample) -> Run:
    return lambda: model(*sample.args, **sample.kwargs)


def _of_turns(
    turns: Sequence[tuple[float, ...]], first: int, second: int
) -> tuple[float, float, float]:
    """The median ratio of two calls, second / first, and both median times in seconds."""
    pairs = [(turn[first], turn[second]) for turn in turns]
    ratio = statistics.median(b / a for a, b in pairs)
    return ratio, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _turns(
    runs: Sequence[Run], sample: Sample, models: Iterable[nn.Module], warm: Sequence[int] = ()
) -> list[tuple[float, ...]]:
    """The times of calls in turns: few where the last call is no slower than the others, more where
    it may be.

    warm: the numbers of those that have just run.
    """
    measure.hold_heap()
    with _garbage.paused(), sample.running(*models), torch.no_grad():
        for number, run in enumerate(runs):
            if number not in warm:
                run()
        first = tuple(map(_seconds, runs))
        is_short = sum(first) < SHORT * len(runs) / 2
        most = ROUNDS if is_short else max(FIRST_ROUNDS, min(ROUNDS, int(LONGEST / sum(first))))
        turns = [] if is_short else [first]
        began = time.perf_counter()
        while len(turns) < most:
            if _is_settled(turns) and (not is_short or time.perf_counter() - began > ENOUGH):
                break
            seen = [first, *turns]
            again = [_again(seen, run, number, is_short) for number, run in enumerate(runs)]
            turns.append(tuple(again))
    return turns


def _again(turns: Sequence[tuple[float, ...]], run: Run, number: int, is_short: bool) -> float:
    """The time of a call; of one that was far slower than the last, what it took at least."""
    taken = [turn[number] for turn in turns]
    if len(turns) >= CLEAR_ROUNDS and min(taken) > HOPELESS * max(turn[-1] for turn in turns):
        return min(taken)
    return _turn(run, is_short)


def _is_settled(turns: Sequence[tuple[float, ...]]) -> bool:
    """Whether the last call is surely no slower than the others."""
    if len(turns) >= CLEAR_ROUNDS and all(t[-1] <= GAIN * min(t[:-1]) for t in turns):
        return True
    last = len(turns[0]) - 1 if turns else 0
    return len(turns) >= FIRST_ROUNDS and all(
        _of_turns(turns, n, last)[0] <= 1.0 for n in range(last)
    )


def _built(
    model: nn.Module,
    dtype: Any,
    sample: Sample,
    chosen: tuple[str, ...],
    seen: Context | None = None,
) -> nn.Module:
    from . import _nothing, _optimize_in_place

    candidate = copied(model)
    _optimize_in_place(candidate, dtype, sample, chosen, _nothing, seen)
    return candidate


def _differs(model: nn.Module, name: str) -> bool:
    """Whether a pass did anything to the model."""
    from . import explain

    return any(entry.pass_name == name for entry in explain(model).done)


def _paired(
    first: nn.Module, second: nn.Module, sample: Sample, rounds: int = ROUNDS
) -> tuple[float, float, float]:
    """Median ratio second / first over paired rounds, and both median times in seconds."""

    runs = (_call(first, sample), _call(second, sample))
    measure.hold_heap()
    with sample.running(first, second), torch.no_grad():
        for run in runs:
            run()
        is_short = sum(map(_seconds, runs)) < SHORT
        rounds = max(rounds, ROUNDS) if is_short else rounds
        pairs = [(_turn(runs[0], is_short), _turn(runs[1], is_short)) for _ in range(rounds)]
    return _of_turns(pairs, 0, 1)


def _turn(run: Run, is_short: bool) -> float:
    """Seconds of a call: a short one after another of the same model, as in a program's loop, where
    its weights lie in the caches still."""
    if is_short:
        run()
    return _seconds(run)


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
