"""What a peer of `oxytorch bench models` is asked to run, and what it hands back."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.core.rounds import Call
from oxytorch.benchmark.models.cases import Inputs, output_tensors


@dataclass(frozen=True)
class Task:
    """What every peer is asked to run.

    Attributes:
        model: in evaluation mode, fp32; a peer that changes modules takes a copy.
        inputs: arguments of `forward`, fp32 where they are floating point.
        dtype: torch.float32 or torch.bfloat16, the precision of the computation.
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


def require(module: str, extra: str = "bench") -> Any:
    """The imported module, or `Absent` that names the package to install."""
    if importlib.util.find_spec(module) is None:
        raise Absent(f"{module} is not installed (pip install 'oxytorch[{extra}]')")
    return importlib.import_module(module)
