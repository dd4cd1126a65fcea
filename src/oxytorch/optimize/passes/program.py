"""Pass `program`: the whole model as one program, or as it was.

Its operators, as they run on the sample input, are fused and called one after the other without its
Python code. Calls of other forms run the model's own code when they are seen first, and a program
from then on, which those that differ in sizes alone share. Without a sample input all calls are of
such forms.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain

import torch
from torch import nn

from ...graph.errors import CaptureError
from ...program.eligible import HELD
from ...program.replay import Replay
from ...rewriting import measure
from ...rewriting.changes import QUANTIZED, log_of
from ..context import OptimizeContext
from ..sample import SampleInput
from ..text_models import core_call, core_of
from . import boundaries, cast, lstm
from .precision import CONVOLUTIONS

LEAST_WEIGHTS = 1 << 18
"""Weights of convolutions from which on a model can be large enough for a program to gain: it looks
at each call at what the model's Python can read."""
LEAST_SHARE = 0.25
"""Part of the weights, but for embeddings, that belong to convolutions where a program is what
makes a model faster. By themselves they gain little: each has to return its results in torch's
order in memory."""
MOST_BYTES = 512 << 20
"""Bytes of the weights of other models, but for embeddings, up to which these become programs
unasked, with a second copy of them."""


def suits(model: nn.Module, is_shown: bool = False) -> bool:
    """Whether a model runs as programs where nothing else is asked for.

    is_shown: whether a sample shows what a call of it is.
    """
    if not _is_plain(model):
        return False
    weights = _weights_of(model, CONVOLUTIONS)
    if weights >= max(LEAST_WEIGHTS, LEAST_SHARE * sum(p.numel() for p in _multiplied(model))):
        return True
    return is_shown and suits_later(model)


def suits_later(model: nn.Module) -> bool:
    """Whether a model may become a program once it is known what it is called with.

    One that generates is called with a state of its own for all but the first tokens.
    """
    if not _is_plain(model) or callable(getattr(model, "generate", None)):
        return False
    weights = _multiplied(model)
    is_large = sum(p.numel() for p in weights) >= LEAST_WEIGHTS
    return is_large and sum(p.nbytes for p in weights) <= MOST_BYTES


def _is_plain(model: nn.Module) -> bool:
    """Whether nothing was quantized, and all tensors are on the CPU."""
    tensors = chain(model.parameters(), model.buffers())
    return log_of(model, QUANTIZED) is None and all(t.device.type == "cpu" for t in tensors)


def _multiplied(model: nn.Module) -> list[nn.Parameter]:
    """The parameters but for those of embeddings, of which calls read a few rows."""
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    rows = {p for table in tables for p in table.parameters()}
    return [p for p in model.parameters() if p not in rows]


def _weights_of(model: nn.Module, kinds: tuple[type, ...]) -> int:
    """The elements of the parameters of all layers of some kinds, and of their weight norms."""
    layers = (module for module in model.modules() if isinstance(module, kinds))
    return sum(p.numel() for p in {p for layer in layers for p in layer.parameters()})


def run(context: OptimizeContext) -> None:
    sample, model = context.sample, context.model
    if any(isinstance(module, torch.jit.ScriptModule) for module in context.paths):
        context.skipped("program", model, "a part of it is TorchScript's")
        return
    if "lstm" in context.passes and any(_is_packed_later(context, m) for m in context.paths):
        context.skipped("program", model, "it has LSTM layers, which oneDNN packs for itself alone")
        return
    try:
        try:
            replay = _captured(context, sample)
        except CaptureError as error:
            may_be_mended = context.tries_later and error.__cause__ is not None
            if not may_be_mended or boundaries.try_out(context):
                raise
            replay = _captured(context, sample)
    except CaptureError as error:
        context.skipped("program", model, str(error))
        return
    finally:
        context.index()
    context.runs_with = boundaries.wanted(context)
    root = replay.module
    context.log.set_forward(root, replay)
    parts = {*model.modules()}
    context.is_program = True
    context.closed.update(parts)
    context.closed_roots = []
    made = "for this input signature; oxytorch.graph.explain shows it"
    if sample is None:
        made = "for each input signature, made when such calls come again"
    context.applied("program", root, f"one program {made}")


def _captured(context: OptimizeContext, sample: SampleInput | None) -> Replay:
    """Convert the model and make its program, or leave it as it is and raise CaptureError.

    Without a sample the program is made later, of a call.
    """
    model = context.model
    if context.must_gain and any(map(context.is_held_elsewhere, context.paths)):
        raise CaptureError(f"{HELD}; let go of that one, then call undo and optimize again")
    with context.all_or_nothing() if context.reverts else nullcontext():
        if "cast" in context.passes:
            cast.convert(context, packs=False)
        boundaries.settle(context)
        context.separate(model)
        core = core_of(model)  # whose caller takes a dictionary and writes to it
        replay = context.replays(model if core is None else core)
        replay.must_gain = context.must_gain
        if sample is None:
            replay.check_plain()
            replay.watch.begin()
            return replay
        measure.hold_heap()
        call = sample.call if core is None else core_call(model, core, sample)
        with sample.learning(model) as written:
            seconds = replay.prepare(*call, written)
        context.program_seconds = seconds if core is None else None
        return replay


def _is_packed_later(context: OptimizeContext, module: nn.Module) -> bool:
    return (
        type(module) is nn.LSTM
        and context.is_open(module)
        and lstm.refusal(context, module) is None
    )
