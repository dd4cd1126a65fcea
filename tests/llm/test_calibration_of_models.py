"""Calibration of language models of many families: layers are seen as a whole run sees them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from language_models import FAMILIES, build, prompt
from torch import Tensor, nn

from oxytorch.quantization import Int4Weight, quantize_
from oxytorch.quantization.calibration import input_moments


def _watched(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The moments of every linear layer's inputs in one plain run."""
    sums: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def add(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            sums.setdefault(name, []).append(given[0].flatten(0, -2))

        return add

    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    joined = {name: torch.cat(parts) for name, parts in sums.items()}
    return {name: rows.t() @ rows / len(rows) for name, rows in joined.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_a_whole_run(family):
    model = build(family).eval()
    batch = prompt()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = dict(input_moments(model, layers, [batch]))
    expected = _watched(model, batch)
    assert {name for name, moments in found.items() if moments is not None} == {*expected}
    for name, moments in expected.items():
        torch.testing.assert_close(found[name], moments, rtol=1e-3, atol=1e-4, msg=name)


def test_blocks_are_calibrated_one_after_the_other():
    """The moments of the second block are those of a model whose first one is quantized."""
    model = build("gemma3").eval()
    batch = prompt()
    first = copy.deepcopy(model)
    quantize_(first, Int4Weight(32), filter="model.layers.0", calibration=[batch])
    expected = _watched(first, batch)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    name = "model.layers.1.mlp.up_proj"
    for path, moments in input_moments(model, layers, [batch]):
        if path == name:
            torch.testing.assert_close(moments, expected[name], rtol=1e-3, atol=1e-4)
            return
        if path == "model.layers.0.mlp.down_proj":
            quantize_(model, Int4Weight(32), filter="model.layers.0", calibration=[batch])
    pytest.fail(f"{name} was not calibrated")
