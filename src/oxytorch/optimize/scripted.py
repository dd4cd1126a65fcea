"""`optimize` for modules of TorchScript: programs that exist."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.jit._freeze import run_frozen_optimizations
from torch.jit._recursive import wrap_cpp_module

from ..graph.errors import CaptureError
from ..program.script import Outcome, fuse
from ..rewriting import measure
from ..rewriting.report import Entry, Report
from .sample import Sample

REPORT = "oxytorch_report"
"""An attribute of the result, which files keep."""
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
    _check(module)
    with measure.steady_heap():
        frozen = _frozen(module)
        report = Report(module.original_name, "dtypes as they are", [_PASS])
        if sample_input is None:
            result = frozen
            why = "nothing is known of its inputs: give a sample_input"
            report.entries.append(Entry(_PASS, "forward", False, why))
        else:
            result = _fastest(frozen, Sample(sample_input), report)
    for name in module._c._method_names():
        if name != "forward" and frozen._c._has_method(name):
            report.entries.append(Entry(_PASS, name, False, "only forward is looked at"))
    result._c._register_attribute(REPORT, torch._C.StringType.get(), json.dumps(asdict(report)))
    return _wrapped(result._c)  # which reads its attributes again


def report_of(module: ScriptModule) -> Report | None:
    """The report of a module that was optimized, in this process or another."""
    if not module._c.hasattr(REPORT):
        return None
    found = json.loads(module._c.getattr(REPORT))
    return Report(**{**found, "entries": [Entry(**each) for each in found["entries"]]})


def _check(module: ScriptModule) -> None:
    if not module._c._has_method("forward"):
        raise ValueError(
            "optimize: expected a module with a forward, got one of TorchScript without"
        )
    parts: list[Any] = [*module.modules()]
    if any(each._c.hasattr("training") and each.training for each in parts):
        raise ValueError(
            "optimize: expected model in evaluation mode, got a module of TorchScript in training "
            "mode; call eval() on it first, or script or trace it in evaluation mode"
        )
    own = next((kind for kind in _kinds(module.graph) if kind.startswith("oxytorch::")), None)
    if own is not None or module._c.hasattr(REPORT):
        found = "one that was" if own is None else f"one that calls {own}"
        raise ValueError(
            "optimize: expected a module of TorchScript that is not optimized yet, got "
            f"{found}; optimize the original"
        )


def _kinds(block: Any) -> Iterator[str]:
    """The kinds of all nodes of a graph or block."""
    for node in block.nodes():
        yield node.kind()
        for each in node.blocks():
            yield from _kinds(each)


def _frozen(module: ScriptModule) -> ScriptModule:
    """A copy whose weights are constants of its graph, with all methods, and with the attributes
    of a module that is frozen already."""
    is_frozen = not module._c.hasattr("training")
    kept = [name for name in module._c._method_names() if name != "forward"]
    if is_frozen:
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
        kept += [*kind.get_attributes()]
    try:
        found = _wrapped(torch._C._freeze_module(module._c, kept))
        if not is_frozen:
            run_frozen_optimizations(found)
    except RuntimeError as error:
        raise ValueError(f"optimize: torch.jit.freeze cannot freeze the module: {error}") from error
    return found


def _wrapped(module: Any) -> ScriptModule:
    """A module of C++ as one of Python."""
    found: ScriptModule = wrap_cpp_module(module)  # type: ignore[no-untyped-call]
    return found


def _fastest(frozen: ScriptModule, sample: Sample, report: Report) -> ScriptModule:
    """The frozen module, fused as far as it pays."""
    found: list[tuple[ScriptModule, Outcome]] = []
    for layouts in (True, False):
        candidate = _frozen(frozen)
        try:
            outcome = fuse(candidate.graph, _arguments(candidate, sample), layouts)
        except CaptureError as error:
            report.entries.append(Entry(_PASS, "forward", False, str(error)))
            return frozen
        if not layouts and outcome.done == found[0][1].done:
            break
        found.append((candidate, outcome))
    for kind, why in found[0][1].left.items():
        report.entries.append(Entry(_PASS, kind, False, why))
    for candidate, outcome in found:
        if not outcome.done:
            continue
        ratio = _ratio(frozen, candidate, sample)
        if ratio <= GAIN:
            for name, count in outcome.done.items():
                report.entries += [Entry(_PASS, "forward", True, name)] * count
            return candidate
        names = ", ".join(sorted(outcome.done))
        why = f"takes {ratio:.2f} times as long on the sample with {names}"
        report.entries.append(Entry(_PASS, "forward", False, why))
    return frozen


def _ratio(frozen: ScriptModule, candidate: ScriptModule, sample: Sample) -> float:
    """The candidate's time divided by that of the frozen module: the median of turns, or the ratio
    of the least times if that is worse."""
    args, kwargs = sample.call
    copies = [copy.deepcopy(each) for each in (frozen, candidate)]  # whose state may change
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


def _arguments(module: ScriptModule, sample: Sample) -> list[Any]:
    """The sample's value for each input of forward.

    Raises ValueError where they do not fit.
    """
    forward: Any = module.forward
    _, *wanted = forward.schema.arguments
    names = [each.name for each in wanted]
    surplus = [name for name in sample.kwargs if name not in names]
    if surplus or len(sample.args) > len(names):
        raise ValueError(
            f"optimize: expected a sample_input for forward({', '.join(names)}), got "
            f"{surplus[0] if surplus else f'{len(sample.args)} arguments'}"
        )
    given = dict(zip(names, sample.args, strict=False)) | sample.kwargs
    for each in wanted:
        if each.name not in given and not each.has_default_value():
            raise ValueError(
                f"optimize: expected a sample_input for forward({', '.join(names)}), got none "
                f"for {each.name}"
            )
    return [given.get(each.name, each.default_value) for each in wanted]
