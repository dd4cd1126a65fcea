"""The archived Intel Extension for PyTorch: its models and its optimizers' steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Absent, first_line, require
from oxytorch.benchmark.models.cases import call_model
from oxytorch.benchmark.models.task import Runner, Task, call_in_dtype
from oxytorch.benchmark.optim.cases import LEARNING_RATE, OPTIMIZERS
from oxytorch.benchmark.peers.optimizers import stock_class


def _extension() -> Any:
    return require("intel_extension_for_pytorch", "archived; needs torch 2.8")


def prepare_predecessor(task: Task) -> Runner:
    """A model optimized, traced and frozen, as it advises."""
    optimized = _extension().optimize(copy.deepcopy(task.model), dtype=task.dtype, inplace=True)
    arguments: dict[str, Any] = (
        {"example_kwarg_inputs": task.inputs}
        if isinstance(task.inputs, dict)
        else {"example_inputs": task.inputs}
    )
    eager = call_in_dtype(optimized, task)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=task.dtype == torch.bfloat16):
        try:
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                optimized, strict=False, check_trace=False, **arguments
            )
            frozen = torch.jit.freeze(traced)
            for _ in range(3):
                call_model(frozen, task.inputs)
        except Exception as error:  # the predecessor's eager mode is the documented way back
            return Runner(eager, notes={"mode": f"eager; tracing failed: {first_line(error)}"})
    return Runner(call_in_dtype(frozen, task), notes={"mode": "traced and frozen"})


def predecessor_step(optimizer: str, parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer of that name with a fused step, as its `optimize` installs it."""
    extension = _extension()
    if optimizer not in ("SGD", "Adam", "Adagrad", "Lamb"):
        raise Absent(f"it has no fused {optimizer} on the CPU")
    make: Any = extension.optim._lamb.Lamb if optimizer == "Lamb" else stock_class(optimizer)
    model = nn.ParameterList(parameters).train()
    result: Optimizer = extension.optimize(
        model,
        optimizer=make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer]),
        dtype=torch.float32,
        inplace=True,
        fuse_update_step=True,
    )[1]
    return result
