"""Passes `dropout`, `fold` and `fuse`: patterns in the record of a run become regions.

A region lies at the innermost module whose call all steps of a pattern belong to. It goes past that
module's own code, and past the code of those modules below it that a step of a pattern lies in; all
others are called as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ...core.packed import PackedTensor
from ...graph.errors import CaptureError
from ...graph.forward import first_numel
from ...graph.fused import FusedAddNorm, FusedLayer
from ...graph.patterns import Choices, Match, Patterns, values_in
from ...graph.record import Record
from ...graph.region import Region, RegionSource, program
from ...rewriting import measure
from ..context import OptimizeContext
from . import cast


@dataclass
class _Home:
    """A call that gets a region: the calls below it that it goes past, and its patterns.

    own: the patterns that made it one; others lie in calls that it goes past.
    numel: elements of the first tensor that it is given.
    """

    numel: int
    inlined: set[int] = field(default_factory=set)
    matches: list[Match] = field(default_factory=list)
    own: list[Match] = field(default_factory=list)


def run(context: OptimizeContext) -> None:
    record = context.run
    if context.is_program:
        return
    if record is None:
        context.skipped("fuse", context.model, context.why_no_run)
        return
    choices = Choices(
        fold="fold" in context.passes and "pack" in context.passes,
        fuse="fuse" in context.passes,
        drop="dropout" in context.passes,
    )
    converts = {m for m in context.paths if context.converts(m)}
    returns = {m: each for m, each in context.boundaries.items() if each.returns is not None}
    patterns = Patterns(
        record, context.recognizer, choices, converts, returns, context.folds, context.is_free
    )
    programs: dict[nn.Module, list[tuple[RegionSource, _Home]]] = {}
    for number, (made, home) in sorted(_programs(context, record, patterns).items()):
        programs.setdefault(record.calls[number].module, []).append((made, home))
    for module, found in programs.items():
        _install(context, module, found)


LEAST = 48 << 10
"""Elements of a region's first tensor from which on the sum of a residual and its norm in float32
are faster in one sweep than torch's two kernels: the Python around them takes longer than these."""


def settle(context: OptimizeContext) -> None:
    """Say of layers that were not packed in the end that what was fused to them runs after them.
    Have regions that spare nothing but sums in float32 begin where that pays."""
    entries = context.log.report.entries
    for entry, layer in context.fused:
        if _is_fused(context, layer):
            continue
        detail = f"{entry.detail}, as separate kernels: the layer is not packed"
        entries[:] = [replace(e, detail=detail) if e is entry else e for e in entries]
    if context.dtype_of or not measure.TIMED:
        return
    for source, numel, matches in context.regions:
        if all(_is_sum_of_floats(context, match) for match in matches):
            source.begin_at(min(LEAST, numel))


def _is_fused(context: OptimizeContext, layer: nn.Module) -> bool:
    """Whether a layer computes what is fused to it in its own sweep."""
    is_packed = isinstance(layer._parameters.get("weight"), PackedTensor)
    return is_packed or layer in context.of_integers


def _is_sum_of_floats(context: OptimizeContext, match: Match) -> bool:
    """Whether all that a match spares is one sweep of float32 numbers."""
    run = match.run
    if match.folded is not None:
        return False
    if isinstance(run, FusedLayer):
        return not _is_fused(context, run.module)
    weight = run.module._parameters.get("weight") if isinstance(run, FusedAddNorm) else None
    return weight is not None and weight.dtype == torch.float32


def _programs(
    context: OptimizeContext, record: Record, patterns: Patterns
) -> dict[int, tuple[RegionSource, _Home]]:
    """The programs of calls, by number. Where a call can have none, those below it may."""
    matches = patterns.run()
    made: dict[int, tuple[RegionSource, _Home]] = {}
    refused: dict[nn.Module, str] = {}
    converted = {*cast.converted_wholes(context), *filter(context.converts, context.paths)}
    while True:
        lost: set[int] = set()
        for number, home in sorted(_homes(context, record, matches).items()):
            if number in made:
                continue
            call = record.calls[number]
            try:
                found = program(
                    record,
                    number,
                    home.inlined,
                    home.matches,
                    patterns.dropped,
                    *call.given,
                    converted,
                )
            except CaptureError as error:
                refused[call.module] = str(error)
                lost.update(map(id, home.own))
            else:
                made[number] = found, home
        if not lost:
            break
        matches = [match for match in matches if id(match) not in lost]
    for module, reason in refused.items():
        context.skipped("fuse", module, reason)
    return made


def _homes(context: OptimizeContext, record: Record, matches: list[Match]) -> dict[int, _Home]:
    """The calls that get a region, by number."""
    homes: dict[int, _Home] = {}
    for match in matches:
        paths = [record.path(record.steps[number].call) for number in match.steps]
        common = [*_common(paths)]
        if not common:
            continue
        inlined = {number for path in paths for number in path[len(common) :]}
        passed = [record.calls[number].module for number in inlined]
        home = common[-1]
        module = record.calls[home].module
        if not context.is_open(module) or not all(map(context.is_free, passed)):
            continue
        if _is_seen(record, match, common):
            continue
        found = homes.setdefault(home, _Home(first_numel(*record.calls[home].given)))
        found.matches.append(match)
        found.own.append(match)
        found.inlined |= inlined
    # What lies in a module that a region goes past is that region's.
    for inner in sorted(homes, reverse=True):
        outer = next((n for n, h in homes.items() if n != inner and inner in h.inlined), None)
        if outer is not None:
            moved = homes.pop(inner)
            homes[outer].matches += moved.matches
            homes[outer].inlined |= moved.inlined
    return homes


def _common(paths: list[list[int]]) -> Iterator[int]:
    for numbers in zip(*paths, strict=False):
        if len({*numbers}) > 1:
            return
        yield numbers[0]


def _is_seen(record: Record, match: Match, around: list[int]) -> bool:
    """Whether a call around a match returns what would no longer be computed."""
    kept = {*values_in(match.results)}
    inner = {v for n in match.steps for v in values_in(record.steps[n].result)} - kept
    return any(inner.intersection(values_in(record.calls[n].output)) for n in around)


def _install(
    context: OptimizeContext, module: nn.Module, found: list[tuple[RegionSource, _Home]]
) -> None:
    forms = {p.form: p.source for p, _ in found}
    if any(forms[p.form] != p.source for p, _ in found):
        context.skipped("fuse", module, "the calls of this module run different code")
        return
    distinct = {p.form: (p, home) for p, home in reversed(found)}
    region = Region(module, [p for p, _ in distinct.values()])
    context.log.set_forward(module, region)
    for source, home in distinct.values():
        context.regions.append((source, home.numel, home.matches))
        for match in home.matches:
            context.applied("fuse", module, match.description)
            if isinstance(match.run, FusedLayer):
                context.fused.append((context.log.report.entries[-1], match.run.module))
            context.fused_layers.update(match.layers)
            if match.folded is not None:
                context.folds[match.folded.layer] = match.folded
                norm = match.folded.norm
                context.applied("fold", norm, f"{type(norm).__name__} into its layer")
