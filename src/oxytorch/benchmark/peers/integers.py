"""Peers that multiply 8-bit integers: static quantization of ONNX Runtime and of OpenVINO.

Calibration is the task's input alone: the weights are random, and speed does not depend on ranges.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from oxytorch.benchmark.core.contest import require
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.exported import (
    exported_onnx,
    onnxruntime_session,
    openvino_model,
    openvino_runner,
)


def prepare_onnxruntime_int8(task: Task) -> Runner:
    """QDQ by `quantize_static`: uint8 activations, int8 weights per channel."""
    quantization: Any = require("onnxruntime.quantization")
    shapes: Any = require("onnxruntime.quantization.shape_inference")
    with tempfile.TemporaryDirectory() as folder:
        plain, ready, path = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "int8"))
        names, arrays = exported_onnx(task, plain)
        shapes.quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(ready),
            str(path),
            _reader(quantization, dict(zip(names, arrays, strict=True))),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
        )
        return onnxruntime_session(task, path, arrays)


def _reader(quantization: Any, feed: dict[str, Any]) -> Any:
    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter([feed])

        def get_next(self) -> Any:
            return next(self.feeds, None)

    return Reader()


def prepare_openvino_int8(task: Task) -> Runner:
    """`nncf.quantize`, and what has no 8-bit form in the precision that OpenVINO chooses."""
    nncf: Any = require("nncf", "pip install nncf")
    model, tensors = openvino_model(task)
    arrays = [tensor.numpy() for tensor in tensors]
    kind = nncf.ModelType.TRANSFORMER if _has_layer_norms(task.model) else None
    feed = dict(zip(_names(model), arrays, strict=True))
    quantized = nncf.quantize(model, nncf.Dataset([feed]), model_type=kind)
    return openvino_runner(task, quantized, tensors)


def _names(model: Any) -> Sequence[str]:
    return [port.get_any_name() for port in model.inputs]


def _has_layer_norms(model: nn.Module) -> bool:
    return any(isinstance(module, nn.LayerNorm) for module in model.modules())
