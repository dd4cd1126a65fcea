"""The contestants of `oxytorch bench models`: oxytorch and the ways of running a model beside it.

Every peer is given the same model and inputs and returns a call without arguments. A peer that
is not installed raises `Absent` with the reason; any other error is reported as a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import oxytorch
from oxytorch import isa
from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.models.cases import call_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.exported import prepare_onnxruntime, prepare_openvino
from oxytorch.benchmark.peers.integers import prepare_onnxruntime_int8, prepare_openvino_int8
from oxytorch.benchmark.peers.predecessor import prepare_predecessor
from oxytorch.benchmark.peers.stock import prepare_compile, prepare_eager, prepare_eager_cast


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


def _no_notes(model: nn.Module) -> dict[str, object]:
    return {}


def optimized(
    task: Task, notes_of: Callable[[nn.Module], dict[str, object]] = _no_notes, **options: Any
) -> Runner:
    """`oxytorch.optimize` of the task's model with these options, run eagerly.

    notes_of: what else to note of the optimized model.
    """
    start = time.perf_counter()
    model = oxytorch.optimize(task.model, **options)
    notes = {"optimize_seconds": time.perf_counter() - start, **notes_of(model)}
    return Runner(lambda: call_model(model, task.inputs), notes=notes)


def prepare_oxytorch(task: Task) -> Runner:
    """`oxytorch.optimize(model, dtype=..., sample_input=..., tune=True)`; `quantize` for int8."""
    if task.dtype == torch.int8:
        return _quantized(task)
    return optimized(task, dtype=task.dtype, sample_input=task.inputs, tune=True)


def _quantized(task: Task) -> Runner:
    start = time.perf_counter()
    model = oxytorch.quantize(task.model, [task.inputs], dtype=_fastest_float())
    notes: dict[str, object] = {"optimize_seconds": time.perf_counter() - start}
    return Runner(lambda: call_model(model, task.inputs), notes=notes)


def _fastest_float() -> torch.dtype | None:
    """The dtype of what is no integer."""
    multiplies = isa.has("tiles") or isa.has("fast_bf16_dot")
    return torch.bfloat16 if multiplies else None


def prepare_oxytorch_float(task: Task) -> Runner:
    """What `oxytorch` is without integers: the way that they have to beat."""
    if task.dtype != torch.int8:
        raise Absent("the same as oxytorch")
    return optimized(task, dtype=_fastest_float(), sample_input=task.inputs, graph=True)


def _onnxruntime(task: Task) -> Runner:
    prepare = prepare_onnxruntime_int8 if task.dtype == torch.int8 else prepare_onnxruntime
    return prepare(task)


def _openvino(task: Task) -> Runner:
    prepare = prepare_openvino_int8 if task.dtype == torch.int8 else prepare_openvino
    return prepare(task)


def by_name(*peers: Peer) -> dict[str, Peer]:
    return {peer.name: peer for peer in peers}


PEERS = by_name(
    Peer("eager", "torch eager", prepare_eager),
    Peer("eager_cast", "torch eager, cast", prepare_eager_cast),
    Peer("compile", "torch.compile", prepare_compile),
    Peer("onnxruntime", "ONNX Runtime", _onnxruntime),
    Peer("openvino", "OpenVINO", _openvino),
    Peer("predecessor", "predecessor", prepare_predecessor),
    Peer("oxytorch_float", "oxytorch, no integers", prepare_oxytorch_float),
    Peer("oxytorch", "oxytorch", prepare_oxytorch),
)
"""Every contestant by name, in the order of the tables; `eager` is the base of all ratios."""
