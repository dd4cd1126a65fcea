"""What a peer of `oxytorch bench models` is asked to run, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.rounds import Call
from oxytorch.benchmark.models.cases import Inputs, call_model, output_tensors


@dataclass(frozen=True)
class Task:
    """What every peer is asked to run.

    Attributes:
        model: in evaluation mode, fp32; a peer that changes modules takes a copy.
        inputs: arguments of `forward`, fp32 where they are floating point.
        dtype: torch.float32 or torch.bfloat16, the precision of the computation; torch.int8: its
            layers multiply integers.
        threads: number of threads every peer may use.
    """

    model: nn.Module
    inputs: Inputs
    dtype: torch.dtype
    threads: int


@dataclass(frozen=True)
class Runner:
    """A peer that is ready to be called.

    Attributes:
        call: runs the model once.
        tensors: the output of `call` -> its tensors, in the order of the original model.
        notes: what a reader should know about this peer on this model.
    """

    call: Call
    tensors: Callable[[object], list[Tensor]] = output_tensors
    notes: dict[str, object] = field(default_factory=dict)


def call_in_dtype(model: Callable[..., object], task: Task) -> Call:
    """A call of the model under autocast where the task is in 16 bits."""
    if task.dtype in (torch.float32, torch.int8):
        return lambda: call_model(model, task.inputs)

    def call() -> object:
        with torch.autocast("cpu", dtype=task.dtype):
            return call_model(model, task.inputs)

    return call
