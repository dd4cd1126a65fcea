"""Time the passes on the user's own input and keep those that win."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..rewriting import measure
from .passes import DEFAULT
from .sample import Sample

ROUNDS = 9
"""Paired rounds per comparison; the median of their ratios decides."""
FIRST_ROUNDS = 3
"""Rounds after which a model that is no slower than it was is believed to be so, if calls are not
short."""
LONGEST = 3.0
"""Seconds that further rounds may take, where the first ones say that it is slower."""
SHORT = 0.05
"""Seconds of both models' calls together up to which calls are short: each is timed after one that
is not."""
LOSS = 1.03
"""Ratio above which a model is slower than it was."""
GAIN = 0.98
"""A pass is dropped only where the model without it takes at most this fraction of the time."""


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


def loses(model: nn.Module, optimized: nn.Module, dtype: Any, sample: Sample) -> bool:
    """Whether a model is slower as a whole than it was, or than in another dtype alone, though each
    of its layers is faster by itself."""
    if not measure.TIMED:
        return False
    if dtype is not None:
        model = _built(model, dtype, sample, ("cast",))
    return _compared(model, optimized, sample)[0] > LOSS


def without_program(
    model: nn.Module, optimized: nn.Module, dtype: Any, sample: Sample, names: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """The passes without `program`, and the times that say so, if they make a faster model.

    optimized: what all of them made of `model`. None if it is as fast, or has no program.
    """
    if not measure.TIMED or not _differs(optimized, "program"):
        return None
    others = tuple(name for name in names if name != "program")
    ratio, before, after = _compared(_built(model, dtype, sample, others), optimized, sample)
    if ratio <= LOSS:
        return None
    line = f"{before * 1e3:.2f} -> {after * 1e3:.2f} ms, ratio {ratio:.3f}: not taken"
    return others, {
        "passes": [*others], "ratio": ratio, "lines": [("with program", line)]
    }  # fmt: skip


def _compared(first: nn.Module, second: nn.Module, sample: Sample) -> tuple[float, float, float]:
    """The same as `_paired`, in more rounds where the first ones say that the second is slower."""
    found = _paired(first, second, sample, FIRST_ROUNDS)
    ratio, before, after = found
    rounds = min(ROUNDS, int(LONGEST / (before + after)))
    if ratio > 1.0 and rounds > FIRST_ROUNDS:
        return _paired(first, second, sample, rounds)
    return found


def _built(model: nn.Module, dtype: Any, sample: Sample, chosen: tuple[str, ...]) -> nn.Module:
    from ..rewriting.copies import copied
    from . import _nothing, _optimize_in_place

    candidate = copied(model)
    _optimize_in_place(candidate, dtype, sample, chosen, _nothing)
    return candidate


def _differs(model: nn.Module, name: str) -> bool:
    """Whether a pass did anything to the model."""
    from . import explain

    return any(entry.pass_name == name for entry in explain(model).done)


def _paired(
    first: nn.Module, second: nn.Module, sample: Sample, rounds: int = ROUNDS
) -> tuple[float, float, float]:
    """Median ratio second / first over paired rounds, and both median times in seconds."""

    def call(model: nn.Module) -> Callable[[], Any]:
        return lambda: model(*sample.args, **sample.kwargs)

    runs = (call(first), call(second))
    measure.hold_heap()
    with sample.running(first, second), torch.no_grad():
        for run in runs:
            run()
        is_short = sum(map(_seconds, runs)) < SHORT
        rounds = max(rounds, ROUNDS) if is_short else rounds
        pairs = [(_turn(runs[0], is_short), _turn(runs[1], is_short)) for _ in range(rounds)]
    ratio = statistics.median(b / a for a, b in pairs)
    return ratio, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _turn(run: Callable[[], Any], is_short: bool) -> float:
    """Seconds of a call: a short one after another of the same model, as in a program's loop, where
    its weights lie in the caches still."""
    if is_short:
        run()
    return _seconds(run)


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
