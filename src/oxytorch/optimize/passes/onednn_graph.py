"""Pass `onednn_graph`: convolution networks as graphs that oneDNN compiles as a whole.

From the top down: the model, or where it is refused the parts of it that hold convolutions. What
is compiled holds for calls of one form; it is left alone by all later passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ...graph.errors import CaptureError
from ...graph.onednn_graph import Graphs, OneDnnProgram, available
from ...graph.replay import Replay
from ..context import Context
from ..sample import before_each
from . import boundaries, cast

FEWEST_CONVOLUTIONS = 2
"""A single one gains nothing from a layout that lasts from one convolution to the next."""
MOST_FORMS = 5
"""Forms of call that are compiled, since each holds weights of its own."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def run(context: Context) -> None:
    if not _convolutions(context.model):
        return
    if context.sample is None:
        context.skipped(
            "onednn_graph", context.model, "needs sample_input to see the sizes of calls"
        )
        return
    if not available():
        context.skipped("onednn_graph", context.model, "this torch has no oneDNN graph compiler")
        return
    if _compiled(context, context.model, context.sample.call):
        return
    with context.sample.running(context.model):
        calls = _observed(context, *context.sample.call)
    for child in context.model.children():
        _visit(context, child, calls)


def _visit(context: Context, module: nn.Module, calls: dict[nn.Module, _Call]) -> None:
    if module in context.compiled or not _convolutions(module):
        return
    if module in calls and _compiled(context, module, calls[module]):
        return
    for child in module.children():
        _visit(context, child, calls)


def _convolutions(module: nn.Module) -> bool:
    """Whether a module holds enough convolutions to gain."""
    return sum(isinstance(m, _ConvNd) for m in module.modules()) >= FEWEST_CONVOLUTIONS


def _observed(
    context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[nn.Module, _Call]:
    """The first call of each module that holds convolutions, in a run of the converted model."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(module, (given, named))

    scripted = torch.jit.ScriptModule
    wanted = [m for m in context.paths if _convolutions(m) and not isinstance(m, scripted)]
    with before_each(wanted, note), torch.no_grad(), boundaries.as_converted(context):
        context.model(*args, **kwargs)
    return calls


def _compiled(context: Context, module: nn.Module, call: _Call) -> bool:
    """Compile a module for calls like this one; else leave it as it was and say why."""
    reason = _refusal(context, module)
    if reason is not None:
        context.skipped("onednn_graph", module, reason)
        return False
    parts = {*module.modules()}
    sample = context.sample
    assert sample is not None
    if _follows_others(context, parts):
        # They are converted after it, and a graph keeps the dtypes that it was compiled for.
        context.skipped("onednn_graph", module, "keeps its dtype among converted modules")
        return False
    try:
        with context.all_or_nothing():
            if "cast" in context.passes:
                inner = [m for m in cast.changed(context) if m in parts]
                cast.convert(context, inner, packs=False)
                closed = [m for m in context.closed_roots if m in parts]
                boundaries.settle(context, [*inner, *closed])
            context.separate(module)
            replay = Replay(module, Graphs, MOST_FORMS)
            with sample.running(context.model):
                replay.prepare(*call)
    except CaptureError as error:
        context.skipped("onednn_graph", module, str(error))
        return False
    finally:
        context.index()
    context.log.set_forward(module, replay)
    context.compiled.update(parts)
    context.closed.update(parts)
    context.closed_roots = [m for m in context.closed_roots if m not in parts]
    (program,) = replay.programs()
    assert isinstance(program, OneDnnProgram)
    plural = "graph" if program.parts == 1 else "graphs"
    context.applied(
        "onednn_graph",
        module,
        f"{type(module).__name__} as {program.parts} {plural}, "
        f"+{program.nbytes / 2**20:.1f} MiB of weights in oneDNN's order",
    )
    return True


def _follows_others(context: Context, parts: set[nn.Module]) -> bool:
    """Whether what stands around some parts depends on the dtype of a module that is none."""
    besides = {context.boundaries[m].beside for m in parts if m in context.boundaries}
    return not besides <= {*parts, None}


def _refusal(context: Context, module: nn.Module) -> str | None:
    parts = {*module.modules()}
    for part in parts:
        if part.training or part._forward_hooks or part._forward_pre_hooks:
            return f"{context.paths[part]} has a hook or is in training mode"
        for parameter in part._parameters.values():
            for owner, _ in context.owners.get(id(parameter), []):
                if owner not in parts:
                    return f"shares a weight with {context.paths[owner]}, which is outside of it"
    return None
