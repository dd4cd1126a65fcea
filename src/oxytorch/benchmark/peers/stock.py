"""The ways of running a model in torch itself."""

from __future__ import annotations

import copy
import time

import torch

from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.models.cases import call_model, cast_tensors
from oxytorch.benchmark.models.task import Runner, Task, call_in_dtype


def prepare_eager(task: Task) -> Runner:
    """The model as it is; in bf16 under `torch.autocast`, entered at every call."""
    return Runner(call_in_dtype(task.model, task))


def prepare_float32(task: Task) -> Runner:
    """The model as it is, whatever dtype is asked for: the way without any change."""
    return Runner(lambda: call_model(task.model, task.inputs))


def prepare_eager_cast(task: Task) -> Runner:
    """The model and its inputs cast with `.to(bfloat16)`."""
    if task.dtype in (torch.float32, torch.int8):
        raise Absent("the same as eager, which runs in float32")
    model = copy.deepcopy(task.model).to(task.dtype)
    inputs = cast_tensors(task.inputs, task.dtype)
    return Runner(lambda: call_model(model, inputs))


def prepare_compile(task: Task) -> Runner:
    """`torch.compile` with Inductor's freezing; in bf16 under autocast."""
    if task.dtype == torch.int8:
        raise Absent("PyTorch quantizes by torchao, which is not among the peers yet")
    import torch._inductor.config as inductor

    inductor.freezing = True
    torch._dynamo.reset()
    call = call_in_dtype(torch.compile(copy.deepcopy(task.model)), task)
    start = time.perf_counter()
    call()
    return Runner(call, notes={"first_call_seconds": time.perf_counter() - start})
