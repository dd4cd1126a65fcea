"""Pass `replay`: the whole model's operators one after the other, without its Python code.

The run on the sample input is recorded after all other passes; calls of the same form run the
recording. It pays where a model's Python takes a good part of the time.
"""

from __future__ import annotations

from typing import Any

import torch

from ...graph.errors import CaptureError
from ...graph.replay import Program, Replay, input_tensors, output_tensors
from ...graph.tape import record
from ..context import Context


def build(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Any]:
    """Record a call's operators on a tape (see graph/tape.py)."""

    forward(*args, **kwargs)  # what is made at the first call is not recorded

    def run_once() -> tuple[Any, list[Any]]:
        output = forward(*args, **kwargs)
        return output, output_tensors(output)

    return record(run_once, input_tensors(args, kwargs))


def run(context: Context) -> None:
    sample = context.sample
    if sample is None:
        return
    if context.compiled:  # recording would go into their parts
        context.skipped(
            "replay", context.model, "not recorded: oneDNN's graphs have no Python to save"
        )
        return
    if any(isinstance(module, torch.jit.ScriptModule) for module in context.paths):
        context.skipped("replay", context.model, "not recorded: a part of it is TorchScript's")
        return
    context.separate(context.model)
    replay = Replay(context.model, build)
    try:
        with sample.running(context.model):
            replay.prepare(*sample.call)
    except CaptureError as error:
        context.skipped("replay", context.model, f"not recorded: {error}")
        return
    context.log.set_forward(context.model, replay)
    context.applied("replay", context.model, "operators recorded for this form of call")
