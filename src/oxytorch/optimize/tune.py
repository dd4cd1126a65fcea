"""Time the passes on the user's own input and keep those that win."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..program.replay import Replay
from ..rewriting import measure, turns
from ..rewriting.copies import InPlace, Separation, copied
from ..rewriting.turns import GAIN, Run, Turns
from .context import OptimizeContext, look_at_sizes, observe
from .passes import DEFAULT
from .sample import SampleInput

LOSS = 1.03
"""Ratio above which a model is slower than it was."""
CLEAR_GAIN, LONG = 0.9, 2e-3
"""A program is not compared with what the other passes make where it takes at most this fraction of
the model's time, and so many seconds."""


def choose(
    model: nn.Module,
    dtype: Any,
    sample: SampleInput,
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
        ratio, before, after = paired(best, candidate, sample)
        keep = ratio <= GAIN
        lines.append((
            f"{'with' if added else 'without'} {name}",
            f"{turns.in_words(ratio, before, after)}: {'used' if keep else 'not used'}",
        ))  # fmt: skip
        if keep:
            best, chosen = candidate, other
        del candidate
    first = build(always) if always else model
    ratio, before, after = paired(first, best, sample)
    lines.append(("original -> optimized", turns.in_words(ratio, before, after)))
    if ratio > 1.0:
        lines.append(("kept the original", "nothing was faster"))
        chosen = always
    return chosen, {"passes": list(chosen), "ratio": ratio, "lines": lines}


@dataclass(frozen=True)
class Request:
    """What `optimize` is asked for: `model` in `dtype`, by the passes `names`, fast on the sample.

    separate, must_gain: see `OptimizeContext`.
    """

    model: nn.Module
    dtype: Any
    sample: SampleInput
    names: tuple[str, ...]
    separate: Separation | InPlace
    must_gain: bool = False

    def run(self, result: nn.Module, **more: Any) -> OptimizeContext:
        """Run the passes on a copy of the model. more: see `optimize_in_place`."""
        from . import optimize_in_place

        asked = self.dtype, self.sample, self.names, self.separate
        return optimize_in_place(result, *asked, must_gain=self.must_gain, **more)


def keep_fastest(request: Request, result: nn.Module) -> tuple[nn.Module, dict[str, Any] | None]:
    """Run the passes on `result`, a copy of the model, or on another one, and return what is
    fastest on the sample; with the times that speak against passes that were left out.

    The result has to be as fast as the model was, or is in another dtype alone, though each of its
    layers is faster by itself. A program has to be as fast as what the other passes make, too,
    which is only made where the program does not gain clearly.
    """
    if not measure.TIMED:
        request.run(result)
        return result, None
    names, sample = request.names, request.sample
    tuned: dict[str, Any] | None = None
    program = _program(request, result) if "program" in names else None
    if program is not None:
        if program.is_program and _gains_clearly(request, program):
            return result, None
        result = copied(request.model)
    seen, candidates = _others(request, result, program), [result]
    if program is not None and program.is_program:
        seen, candidates = program, [result, program.model]
    first, beside, is_warm = _first(request, seen)
    runs = [first, *(_call(each, sample) for each in candidates)]
    warm = [0] * is_warm + [2] * (len(runs) > 2)  # a program's first run was compared
    taken = _turns(runs, sample, [*beside, *candidates], warm)
    if len(candidates) > 1:
        ratio, before, after = turns.compared(taken, 1, 2)
        if ratio <= LOSS:
            result = candidates[1]
        else:
            taken, names = [turn[:2] for turn in taken], _without_program(names)
            line = f"{turns.in_words(ratio, before, after)}: not used"
            tuned = {"passes": [*names], "ratio": ratio, "lines": [("with program", line)]}
    if turns.compared(taken, 0, -1)[0] <= LOSS:
        return result, tuned
    always = () if request.dtype is None else ("cast",)
    names, chosen = choose(request.model, request.dtype, sample, names, always)
    if tuned is not None:
        chosen = {**chosen, "lines": [*tuned["lines"], *chosen["lines"]]}
    result = copied(request.model)
    replace(request, names=names).run(result)
    return result, chosen


def _program(request: Request, result: nn.Module) -> OptimizeContext:
    """Run the pass `program` alone on a copy of the model; what is known of it then."""

    def look(context: OptimizeContext) -> None:
        context.tries_later = True
        if request.dtype is not None:
            look_at_sizes(context)

    return request.run(result, look=look, runs=("program",))


def _gains_clearly(request: Request, program: OptimizeContext) -> bool:
    """Whether a program takes clearly less time than the model did, and a call of it long enough
    for what the other passes do without: a look at what the model's Python can read."""
    first, beside, is_warm = _first(request, program)
    runs = [first, _call(program.model, request.sample)]
    known = program.program_seconds if is_warm else None
    if known is not None and known[1] >= LONG and turns.is_settled([known]):
        return True  # even by its first call, which takes longer than others
    own = None if known is None else known[0]
    taken = _turns(runs, request.sample, [*beside, program.model], [0] * is_warm + [1], own)
    ratio, _, seconds = turns.compared(taken, 0, 1)
    return ratio <= CLEAR_GAIN and seconds >= LONG


def _others(
    request: Request, result: nn.Module, program: OptimizeContext | None
) -> OptimizeContext:
    """Run the passes but `program` on a copy of the model; what is known of it then.

    program: what is known of another copy, on which that pass was run.
    """
    if program is None:
        return request.run(result)
    is_seen = program.is_program and request.dtype is None

    def look(context: OptimizeContext) -> None:
        observe(context, once=is_seen)  # a program took two runs that did the same
        context.runs_with = program.runs_with

    names = _without_program(request.names)
    seen = replace(request, names=names).run(result, look=look)
    if not program.is_program:
        report = seen.log.report
        report.passes, report.entries[:0] = [*request.names], program.log.report.entries
    return seen


def _without_program(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "program")


def _first(request: Request, seen: OptimizeContext) -> tuple[Run, list[nn.Module], bool]:
    """A call of the model as it was, or in another dtype alone, the modules that it runs, and
    whether such calls were made before.

    seen: what is known of a copy that passes have changed. The own code of a program is that of
    the model in the other dtype.
    """
    model, dtype, sample = request.model, request.dtype, request.sample
    if dtype is None:
        return _call(model, sample), [model], True
    forward = seen.model.__dict__.get("forward")
    if seen.is_program and not seen.packing_decides and isinstance(forward, Replay):
        own = forward.forward
        return lambda: sample.given_to(own), [], True
    converted = _built(model, dtype, sample, ("cast",), seen)
    return _call(converted, sample), [converted], False


def _call(model: nn.Module, sample: SampleInput) -> Run:
    return lambda: sample.given_to(model)


def _turns(
    runs: Sequence[Run],
    sample: SampleInput,
    models: Iterable[nn.Module],
    warm: Sequence[int] = (),
    known: float | None = None,
) -> Turns:
    """The times of calls of models on the sample. warm, known: see `turns.taken`."""
    with sample.running(*models), torch.no_grad():
        return turns.taken(runs, warm, known)


def _built(
    model: nn.Module,
    dtype: Any,
    sample: SampleInput,
    chosen: tuple[str, ...],
    seen: OptimizeContext | None = None,
) -> nn.Module:
    from . import optimize_in_place

    candidate = copied(model)
    look = observe if seen is None else partial(OptimizeContext.take_over, seen=seen)
    optimize_in_place(candidate, dtype, sample, chosen, InPlace(), look)
    return candidate


def _differs(model: nn.Module, name: str) -> bool:
    """Whether a pass did anything to the model."""
    from . import explain

    return any(entry.pass_name == name for entry in explain(model).applied)


def paired(first: nn.Module, second: nn.Module, sample: SampleInput) -> tuple[float, float, float]:
    """Median ratio second / first over paired rounds, and both median times in seconds."""
    return paired_runs(_call(first, sample), _call(second, sample), sample, first, second)


def paired_runs(
    first: Run, second: Run, sample: SampleInput, *models: nn.Module
) -> tuple[float, float, float]:
    """The same of calls of models on the sample."""
    with sample.running(*models), torch.no_grad():
        return turns.compared(turns.all_rounds([first, second]), 0, 1)
