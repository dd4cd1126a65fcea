"""`optimize` for modules of TorchScript: programs that exist."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.jit import ScriptModule

from ..graph.errors import CaptureError
from ..program.script import Outcome, frozen, fuse
from ..rewriting import measure
from ..rewriting.report import Entry, Report
from .sample import SampleInput

_PASS = "script"
WARM_UP = 3
"""Calls after which TorchScript has settled how it runs a graph."""
GAIN = 0.98
"""The part of the frozen module's time that the fused one may take."""
ROUNDS, FEWEST = 15, 5
"""Turns of both."""
TURN, LONGEST = 2e-3, 3.0
"""Seconds of both in a turn, at least, and of all turns."""


def optimize_scripted(module: ScriptModule, sample_input: Any) -> ScriptModule:
    """A frozen copy of a module of TorchScript, with its operators fused.

    Raises ValueError where the module is in training mode, was optimized before or cannot be
    frozen.
    """
    frozen.check(module)
    with measure.steady_heap():
        stock = frozen.frozen(module)
        report = Report(module.original_name, "dtypes as they are", [_PASS])
        if sample_input is None:
            result = stock
            why = "nothing is known of its inputs: give a sample_input"
            report.entries.append(Entry(_PASS, "forward", False, why))
        else:
            result = _fastest(stock, SampleInput(sample_input), report)
    kept = frozen.other_methods(stock)
    for name in frozen.other_methods(module):
        if name in kept:
            report.entries.append(Entry(_PASS, name, False, "only forward is looked at"))
    return frozen.with_report(result, report)


def _fastest(stock: ScriptModule, sample: SampleInput, report: Report) -> ScriptModule:
    """The frozen module, fused as far as it pays."""
    found: list[tuple[ScriptModule, Outcome]] = []
    for layouts in (True, False):
        candidate = frozen.frozen(stock)
        try:
            outcome = fuse(candidate.graph, frozen.arguments(candidate, *sample.call), layouts)
        except CaptureError as error:
            report.entries.append(Entry(_PASS, "forward", False, str(error)))
            return stock
        if not layouts and outcome.applied == found[0][1].applied:
            break
        found.append((candidate, outcome))
    for kind, why in found[0][1].skipped.items():
        report.entries.append(Entry(_PASS, kind, False, why))
    for candidate, outcome in found:
        if not outcome.applied:
            continue
        ratio = _ratio(stock, candidate, sample)
        if ratio <= GAIN:
            for name, count in outcome.applied.items():
                report.entries += [Entry(_PASS, "forward", True, name)] * count
            return candidate
        names = ", ".join(sorted(outcome.applied))
        why = f"takes {ratio:.2f} times as long on the sample with {names}"
        report.entries.append(Entry(_PASS, "forward", False, why))
    return stock


def _ratio(stock: ScriptModule, candidate: ScriptModule, sample: SampleInput) -> float:
    """The candidate's time divided by that of the frozen module: the median of turns, or the ratio
    of the least times if that is worse."""
    args, kwargs = sample.call
    copies = [copy.deepcopy(each) for each in (stock, candidate)]  # whose state may change
    runs = [partial(each, *args, **kwargs) for each in copies]
    measure.hold_heap()
    with sample.running(), torch.no_grad():
        for _ in range(WARM_UP):
            for run in runs:
                run()
        if not measure.TIMED:
            return 0.0
        once = sum(_seconds(run, 1) for run in runs)
        calls = max(1, round(TURN / once))
        rounds = max(FEWEST, min(ROUNDS, int(LONGEST / (once * calls))))
        pairs = [[_seconds(run, calls) for run in runs] for _ in range(rounds)]
    least: list[float] = [min(each) for each in zip(*pairs, strict=True)]
    usual: float = statistics.median(after / before for before, after in pairs)
    worst: float = max(usual, least[1] / least[0])
    return worst


def _seconds(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - began
