from __future__ import annotations

import pytest
import torch
from torch import nn

from oxytorch.benchmark.core.contest import Absent, largest_difference, require
from oxytorch.benchmark.models.cases import ModelCase, call_model, output_tensors
from oxytorch.benchmark.models.task import Task
from oxytorch.benchmark.peers.exported import prepare_onnxruntime, prepare_openvino
from oxytorch.benchmark.peers.integers import prepare_onnxruntime_int8, prepare_openvino_int8

PREPARE = {"onnxruntime": prepare_onnxruntime, "openvino": prepare_openvino}
INTEGERS = {
    "onnxruntime": (("onnxruntime", "onnx"), prepare_onnxruntime_int8),
    "openvino": (("openvino", "nncf"), prepare_openvino_int8),
}


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@pytest.mark.parametrize("peer", PREPARE)
@pytest.mark.parametrize("keywords", [True, False], ids=["keywords", "positional"])
def test_exported_model_gives_every_output(peer: str, keywords: bool, tiny_case: ModelCase) -> None:
    pytest.importorskip(peer)
    if peer == "onnxruntime":
        pytest.importorskip("onnx")
    model, inputs = tiny_case.build(3)
    if not keywords:
        model, inputs = nn.Sequential(nn.Linear(8, 5), nn.ReLU()).eval(), (torch.randn(3, 8),)
    with torch.no_grad():
        expected = output_tensors(call_model(model, inputs))
        runner = PREPARE[peer](Task(model, inputs, torch.float32, 1))
        outputs = runner.tensors(runner.call())
    assert largest_difference(outputs, expected) < 1e-5
    assert not model.training, "an exporter must leave the model in evaluation mode"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("peer", INTEGERS)
def test_quantized_model_gives_about_the_same_output(peer: str, tiny_case: ModelCase) -> None:
    packages, prepare = INTEGERS[peer]
    for package in packages:
        pytest.importorskip(package)
    model, inputs = tiny_case.build(3)
    with torch.no_grad():
        expected = output_tensors(call_model(model, inputs))
        runner = prepare(Task(model, inputs, torch.int8, 1))
        outputs = runner.tensors(runner.call())
    assert 0 < largest_difference(outputs, expected) < 0.1


def test_onnxruntime_is_absent_in_bfloat16(tiny_case: ModelCase) -> None:
    model, inputs = tiny_case.build(1)
    with pytest.raises(Absent, match="bfloat16"):
        prepare_onnxruntime(Task(model, inputs, torch.bfloat16, 1))


def test_a_missing_package_is_named_with_the_command() -> None:
    with pytest.raises(Absent, match=r"no_such_peer is not installed \(pip install"):
        require("no_such_peer")
