"""The contestants of `oxytorch bench models`: oxytorch and the ways of running a model beside it.

Every peer is given the same model and inputs and returns a call without arguments. A peer that
is not installed raises `Absent` with the reason; any other error is reported as a failure.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxytorch.benchmark.core.contest import Absent, first_line
from oxytorch.benchmark.core.rounds import Call
from oxytorch.benchmark.models.cases import Inputs, call_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.exported import prepare_onnxruntime, prepare_openvino


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Attributes:
        name: the word used in `--peers` and in results.
        label: what tables and plots call it, per dtype name.
        prepare: makes the peer ready for a task.
    """

    name: str
    label: str
    prepare: Callable[[Task], Runner]


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with every floating-point tensor in the given dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, dict):
        return {name: cast(tensor) for name, tensor in inputs.items()}
    return tuple(cast(tensor) for tensor in inputs)


def _call_in_dtype(model: Callable[..., object], task: Task) -> Call:
    """A call of the model under autocast where the task is not in fp32."""
    if task.dtype == torch.float32:
        return lambda: call_model(model, task.inputs)

    def call() -> object:
        with torch.autocast("cpu", dtype=task.dtype):
            return call_model(model, task.inputs)

    return call


def prepare_eager(task: Task) -> Runner:
    """The model as it is; in bf16 under `torch.autocast`, entered at every call."""
    return Runner(_call_in_dtype(task.model, task))


def prepare_eager_cast(task: Task) -> Runner:
    """The model and its inputs cast with `.to(bfloat16)`."""
    if task.dtype == torch.float32:
        raise Absent("the same as eager in float32")
    model = copy.deepcopy(task.model).to(task.dtype)
    inputs = cast_inputs(task.inputs, task.dtype)
    return Runner(lambda: call_model(model, inputs))


def prepare_compile(task: Task) -> Runner:
    """`torch.compile` with Inductor's freezing; in bf16 under autocast."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(task.model))
    call = _call_in_dtype(compiled, task)
    start = time.perf_counter()
    call()
    return Runner(call, notes={"first_call_seconds": time.perf_counter() - start})


def prepare_oxytorch(task: Task) -> Runner:
    """`oxytorch.optimize(model, dtype=..., sample_input=..., tune=True)`, run eagerly."""
    oxytorch = importlib.import_module("oxytorch")
    if not hasattr(oxytorch, "optimize"):
        raise Absent("this oxytorch has no optimize()")
    start = time.perf_counter()
    model = oxytorch.optimize(
        task.model, dtype=task.dtype, sample_input=task.inputs, inplace=False, tune=True
    )
    notes: dict[str, object] = {"optimize_seconds": time.perf_counter() - start}
    return Runner(lambda: call_model(model, task.inputs), notes=notes)


def prepare_predecessor(task: Task) -> Runner:
    """The archived Intel Extension for PyTorch: optimized, traced and frozen, as it advises."""
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        raise Absent("intel_extension_for_pytorch is not installed (archived; needs torch 2.8)")
    predecessor = importlib.import_module("intel_extension_for_pytorch")
    model = copy.deepcopy(task.model)
    optimized = predecessor.optimize(model, dtype=task.dtype, inplace=True)
    arguments: dict[str, Any] = (
        {"example_kwarg_inputs": task.inputs}
        if isinstance(task.inputs, dict)
        else {"example_inputs": task.inputs}
    )
    eager = _call_in_dtype(optimized, task)
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
    return Runner(_call_in_dtype(frozen, task), notes={"mode": "traced and frozen"})


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("eager", "torch eager", prepare_eager),
        Peer("eager_cast", "torch eager, cast", prepare_eager_cast),
        Peer("compile", "torch.compile", prepare_compile),
        Peer("onnxruntime", "ONNX Runtime", prepare_onnxruntime),
        Peer("openvino", "OpenVINO", prepare_openvino),
        Peer("predecessor", "predecessor", prepare_predecessor),
        Peer("oxytorch", "oxytorch", prepare_oxytorch),
    )
}
"""Every contestant by name, in the order of the tables; `eager` is the base of all ratios."""
