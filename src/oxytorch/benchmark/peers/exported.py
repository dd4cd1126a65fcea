"""Peers that run an exported model: ONNX Runtime and OpenVINO."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.models.cases import output_tensors
from oxytorch.benchmark.models.task import Runner, Task


class PositionalModel(nn.Module):
    """A model with positional inputs and a flat tuple of output tensors, as exporters want it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.names is None:
            output = self.model(*tensors)
        else:
            output = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(output_tensors(output))


def _positional(task: Task) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A copy of the task's model for an exporter, which may change what it is given."""
    model = copy.deepcopy(task.model)
    if isinstance(task.inputs, dict):
        return PositionalModel(model, tuple(task.inputs)).eval(), tuple(task.inputs.values())
    return PositionalModel(model, None).eval(), task.inputs


def prepare_onnxruntime(task: Task) -> Runner:
    """ONNX Runtime's CPU provider on the TorchScript-based ONNX export, all optimizations on."""
    if task.dtype != torch.float32:
        raise Absent("its CPU provider has no bfloat16 kernels for these models")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _, arrays = exported_onnx(task, path)
        return onnxruntime_session(task, path, arrays)


def exported_onnx(task: Task, path: Path) -> tuple[list[str], list[Any]]:
    """Write the task's model as ONNX; returns the names and values of its inputs."""
    onnx = require("onnx")
    model, tensors = _positional(task)
    torch.onnx.export(model, tensors, str(path), dynamo=False, opset_version=17)
    names = [node.name for node in onnx.load(str(path)).graph.input]
    arrays = [tensor.numpy() for tensor in tensors]
    return names, arrays[: len(names)]  # the exporter drops those that nothing reads


def onnxruntime_session(task: Task, path: Path, arrays: Sequence[Any]) -> Runner:
    """A session of ONNX Runtime over a file, with the inputs that it is to run on."""
    onnxruntime = require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {node.name: array for node, array in zip(session.get_inputs(), arrays, strict=False)}
    return Runner(lambda: session.run(None, feeds), _tensors_of_arrays)


def prepare_openvino(task: Task) -> Runner:
    """OpenVINO's CPU plug-in with latency hint, static shapes and the task's precision."""
    return openvino_runner(task, *openvino_model(task))


def openvino_model(task: Task) -> tuple[Any, tuple[Tensor, ...]]:
    """The task's model as OpenVINO's, with its inputs."""
    os.environ.setdefault("OPENVINO_TELEMETRY_OPT_OUT", "1")
    openvino = require("openvino")
    model, tensors = _positional(task)
    converted = openvino.convert_model(
        model, example_input=tensors, input=[tuple(tensor.shape) for tensor in tensors]
    )
    return converted, tensors


_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Of what is no integer; OpenVINO chooses the precision of others."""


def openvino_runner(task: Task, model: Any, tensors: Sequence[Tensor]) -> Runner:
    """OpenVINO's model, compiled for the task, with the inputs that it is to run on."""
    hints: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": task.threads}
    if task.dtype in _PRECISIONS:
        hints["INFERENCE_PRECISION_HINT"] = _PRECISIONS[task.dtype]
    compiled = require("openvino").Core().compile_model(model, "CPU", hints)
    request = compiled.create_infer_request()
    arrays = [tensor.numpy() for tensor in tensors]

    def call() -> object:
        result = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [result[port] for port in compiled.outputs]

    return Runner(call, _tensors_of_arrays)


def _tensors_of_arrays(output: object) -> list[Tensor]:
    """Copies: the arrays of an OpenVINO request are overwritten by its next call."""
    arrays: Any = output
    return [torch.from_numpy(array.copy()) for array in arrays]
