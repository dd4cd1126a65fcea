"""Pass `program`: the whole model as one program, or as it was.

Its operators, as they run on the sample input, are fused and called one after the other without its
Python code. Calls of other forms run the model's own code when they are seen first, and a program of
their own from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...graph.errors import CaptureError
from ...graph.replay import Replay
from ...program.recorded import build
from ..context import Context
from . import boundaries, cast


def run(context: Context) -> None:
    sample, model = context.sample, context.model
    if sample is None:
        context.skipped("program", model, "needs sample_input to see what the model's code does")
        return
    if any(isinstance(module, torch.jit.ScriptModule) for module in context.paths):
        context.skipped("program", model, "a part of it is TorchScript's")
        return
    try:
        with _all_or_nothing(context):
            if "cast" in context.passes:
                cast.convert(context, cast.changed(context), packs=False)
                boundaries.settle(context)
            context.separate(model)
            replay = Replay(model, build)
            with sample.running(model):
                replay.prepare(*sample.call)
    except CaptureError as error:
        context.skipped("program", model, str(error))
        return
    finally:
        context.index()
    context.log.set_forward(model, replay)
    parts = {*model.modules()}
    context.compiled.update(parts)
    context.closed.update(parts)
    context.closed_roots = []
    context.applied("program", model, "operators fused in one program for this form of call")


@contextmanager
def _all_or_nothing(context: Context) -> Iterator[None]:
    """Take back what was changed where an error is raised, with the very same parameters."""
    before = [
        (m, {**m._parameters}, {**m._buffers}, m.__dict__.get("forward")) for m in context.paths
    ]
    values: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = [
        (p, p.data, p.grad) for p in context.model.parameters() if type(p) is torch.nn.Parameter
    ]
    values += [(b, b.data, b.grad) for b in context.model.buffers()]
    changes, entries = len(context.log.changes), len(context.log.report.entries)
    around = {**context.boundaries}
    try:
        yield
    except Exception:
        for module, parameters, buffers, forward in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
        for tensor, data, gradient in values:
            tensor.data = data
            tensor.grad = gradient
        del context.log.changes[changes:]
        del context.log.report.entries[entries:]
        context.boundaries = around
        raise
