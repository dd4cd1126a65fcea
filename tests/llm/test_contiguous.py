"""Weights of optimized models lie in memory as the user's did, for whoever looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import FAMILIES, build, distance, logits, prompt
from torch import nn
from torch.nn.utils import parameters_to_vector, prune

import oxytorch
from oxytorch import llm
from oxytorch.llm.packing import Packer
from oxytorch.llm.plan import ProductPlan
from oxytorch.rewriting.changes import ChangeLog
from oxytorch.rewriting.report import Report

_FORMATS = [{"dtype": torch.float32}, {}, {"weights": "int8"}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", _FORMATS, ids=str)
def test_weights_have_the_strides_of_the_users(family: str, options: dict[str, Any]) -> None:
    model = build(family)
    fast = llm.optimize(model, **options)
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    found = {name: parameter.stride() for name, parameter in fast.named_parameters()}
    assert {**found, **strides} == found  # a tied head is a parameter of its own
    for name, value in fast.state_dict().items():
        assert value.is_contiguous(), name
    vector = parameters_to_vector(fast.parameters())
    assert len(vector) == sum(p.numel() for p in fast.parameters())
    for parameter in fast.parameters():
        assert parameter.view(-1).shape == (parameter.numel(),)
    oxytorch.undo(fast)
    assert {name: parameter.stride() for name, parameter in fast.named_parameters()} == strides


@pytest.mark.parametrize("options", _FORMATS, ids=str)
def test_weights_stored_transposed_can_be_saved_and_pruned(
    options: dict[str, Any], tmp_path: Any
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = build("gpt2")
    fast = llm.optimize(model, **options)
    state = {k: v for k, v in fast.state_dict().items() if k != "lm_head.weight"}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    read = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], value) for name, value in state.items())
    part = fast.transformer.h[1].mlp.c_fc
    prune.l1_unstructured(part, "weight", 0.5)
    given = prompt()
    assert int((part.weight == 0).sum()) >= part.weight.numel() // 2
    prune.l1_unstructured(model.transformer.h[1].mlp.c_fc, "weight", 0.5)
    assert distance(logits(fast, given), logits(model, given)) < 0.05


class Stored(nn.Module):
    """A linear layer whose weight is [out, in], or [in, out] if transposed."""

    def __init__(self, inputs: int, outputs: int, transposed: bool) -> None:
        super().__init__()
        sizes = (inputs, outputs) if transposed else (outputs, inputs)
        self.weight = nn.Parameter(torch.randn(sizes))
        self.bias = nn.Parameter(torch.randn(outputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [[32, 32], [24, 24], [7, 7], [64]])
@pytest.mark.parametrize("transposed", [False, True])
def test_joined_weights_look_contiguous_and_a_write_to_one_leaves_the_others(
    dtype: torch.dtype, gated: bool, rows: list[int], transposed: bool
) -> None:
    parts = nn.ModuleList([Stored(32, count, transposed) for count in rows])
    expected = [part.weight.detach().clone().to(dtype) for part in parts]
    packer = Packer(ChangeLog(Report("", "", [])), parts, dtype, None, True, True)
    plan = ProductPlan(tuple(str(i) for i in range(len(rows))), transposed, gated)
    product = packer.of(parts, plan)
    for part, values in zip(parts, expected, strict=True):
        assert part.weight.is_contiguous() and torch.equal(part.weight, values)
        assert part.weight.view(-1).shape == (values.numel(),)
        with torch.no_grad():
            part.weight.mul_(2)
        stored: Any = part.weight
        if hasattr(stored, "sync"):
            stored.sync()
    whole: Any = product.weight
    values = whole.dense() if hasattr(whole, "dense") else whole
    rows_of = [value.t() if transposed else value for value in expected]
    assert torch.equal(values, 2 * torch.cat(rows_of))
