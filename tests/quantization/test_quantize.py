"""`quantize_`: which layers, what they compute then, what stays as it was, and the way back."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oxytorch
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import (
    Float8Weight,
    Int4Weight,
    Int8Weight,
    NF4Weight,
    WeightConfig,
)
from oxytorch.rewriting import memory
from tiny import TiedEmbedding, tiny_llama
from weight_configs import MOST_ERROR


def is_plain(module: nn.Module) -> bool:
    return type(module.weight) is nn.Parameter and "forward" not in module.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "most"), MOST_ERROR.items(), ids=lambda x: repr(x))
def test_layers_compute_with_the_rounded_weights(
    small: Any, config: WeightConfig, most: float, dtype: torch.dtype
) -> None:
    small.to(dtype)
    before = small.up.weight.detach().clone()
    oxytorch.quantize_(small, config)
    weight = small.up.weight
    assert type(weight) is PanelWeight and weight.format == config.format
    assert (weight.shape, weight.dtype) == (before.shape, dtype)
    assert weight.activation_dtype == config.activation_dtype
    error = (weight.dense() - before).float().norm() / before.float().norm()
    assert 1e-4 < error < most
    x = torch.randn(5, 256).to(dtype)
    wanted = F.linear(x.float(), weight.dense().float(), small.up.bias.float())
    allowed = 2e-2 if config.activation_dtype or dtype == torch.bfloat16 else 2e-3
    with torch.no_grad():
        found = small.up(x)
    assert found.dtype == dtype
    assert (found.float() - wanted).norm() < allowed * wanted.norm()


def test_gradients_flow_through_quantized_layers(small: Any, ids: torch.Tensor) -> None:
    oxytorch.quantize_(small, Int4Weight())
    x = torch.randn(5, 256, requires_grad=True)
    small.up(x).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    F.linear(other, small.up.weight.dense(), small.up.bias.detach()).square().sum().backward()
    assert x.grad is not None and other.grad is not None
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_only_linear_layers_change_and_the_report_tells(small: Any) -> None:
    report = oxytorch.quantize_(small, Int4Weight())
    assert type(small.up.weight) is type(small.down.weight) is PanelWeight
    assert is_plain(small.table) and is_plain(small.norm)
    assert all(type(p) is nn.Parameter for p in small.recurrent.parameters())
    assert [layer.module for layer in report.layers] == ["up", "down"]
    assert report.layers[0].shape == (128, 256)
    # Codes of 4 bits; a float32 for each output; a float16 for each group of 128.
    assert report.layers[0].bytes_before == 128 * 256 * 4
    assert report.layers[0].bytes_after == 128 * 256 // 2 + 128 * 4 + 128 * 2 * 2
    saved = sum(layer.bytes_before - layer.bytes_after for layer in report.layers)
    assert report.bytes_before - report.bytes_after == saved
    assert {entry.module for entry in report.skipped} == {"table", "recurrent"}
    text = str(report)
    assert "Embedding is no linear layer" in text and "LSTM is no linear layer" in text
    assert "[128, 256] 128.0 KiB -> 17.0 KiB" in text
    assert str(oxytorch.explain(small)) == text
    assert report.as_dict()["layers"][1]["module"] == "down"


@pytest.mark.parametrize(
    ("filter", "taken"),
    [
        ("up", {"up"}),
        (["up", "down"], {"up", "down"}),
        ("*n", {"down"}),
        (lambda path, module: module.out_features == 64, {"down"}),
        ([], set()),
    ],
)
def test_filters_choose_layers(small: Any, filter: Any, taken: set[str]) -> None:
    report = oxytorch.quantize_(small, Int8Weight(), filter=filter)
    assert {layer.module for layer in report.layers} == taken
    left = {entry.module for entry in report.skipped if "filter" in entry.detail}
    assert left == {"up", "down"} - taken
    assert is_plain(small.up) == ("up" not in taken)


def test_a_name_takes_all_below_it(small: Any) -> None:
    model = nn.ModuleDict({"a": small, "b": nn.Linear(64, 64)})
    report = oxytorch.quantize_(model, Int8Weight(), filter="a")
    assert {layer.module for layer in report.layers} == {"a.up", "a.down"}


def test_state_dicts_stay_plain_and_load_again(small: Any, ids: torch.Tensor) -> None:
    keys = list(small.state_dict())
    oxytorch.quantize_(small, Int4Weight())
    with torch.no_grad():
        wanted = small(ids)
    state = small.state_dict()
    assert list(state) == keys
    assert all(type(value) is torch.Tensor for value in state.values())
    assert torch.equal(state["up.weight"], small.up.weight.dense())
    state = {name: value.clone() for name, value in state.items()}  # no longer the model's own
    small.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(small(ids), wanted)
    small.load_state_dict({**state, "up.weight": torch.randn(128, 256)})
    with torch.no_grad():
        assert not torch.equal(small(ids), wanted)
    assert type(small.up.weight) is PanelWeight


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same_and_are_apart(
    small: Any, ids: torch.Tensor, duplicate: Any
) -> None:
    oxytorch.quantize_(small, Int4Weight())
    with torch.no_grad():
        wanted = small(ids)
        other = duplicate(small)
        assert torch.equal(other(ids), wanted)
        other.up.weight.zero_()
        assert torch.equal(small(ids), wanted)
        assert not torch.equal(other(ids), wanted)


def test_undo_makes_weights_plain_and_keeps_their_values(small: Any, ids: torch.Tensor) -> None:
    oxytorch.quantize_(small, Int4Weight())
    rounded = small.up.weight.dense()
    hooks = len(small.up._state_dict_hooks)
    assert oxytorch.undo(small) is small
    assert is_plain(small.up) and is_plain(small.down)
    assert torch.equal(small.up.weight, rounded)
    assert small.up.weight.requires_grad
    assert len(small.up._state_dict_hooks) == hooks - 1
    with pytest.raises(ValueError, match="undo: expected a model"):
        oxytorch.undo(small)


def test_a_second_call_takes_the_layers_that_are_left(small: Any) -> None:
    oxytorch.quantize_(small, Int4Weight(), filter="up")
    report = oxytorch.quantize_(small, Int8Weight())
    assert (small.up.weight.format, small.down.weight.format) == ("int4", "int8")
    assert {e.module: e.detail for e in report.skipped}["up"] == "int4 already"
    shown = oxytorch.explain(small)
    assert [layer.module for layer in shown.layers] == ["up", "down"]  # type: ignore[attr-defined]
    oxytorch.undo(small)
    assert is_plain(small.up) and is_plain(small.down)


def test_optimize_improves_the_rest_of_a_quantized_model(small: Any, ids: torch.Tensor) -> None:
    oxytorch.quantize_(small, Int4Weight())
    with torch.no_grad():
        wanted = small(ids)
        better = oxytorch.optimize(small, sample_input=ids)
        torch.testing.assert_close(better(ids), wanted, rtol=1e-3, atol=1e-3)
    assert type(better.up.weight) is PanelWeight
    with pytest.raises(ValueError, match=r"call oxytorch\.undo\(model\) first, quantize"):
        oxytorch.quantize_(better, Int8Weight())
    oxytorch.undo(better)
    assert type(better.up.weight) is PanelWeight
    oxytorch.undo(better)
    assert is_plain(better.up)
    assert type(small.up.weight) is PanelWeight


def test_a_weight_of_two_layers_is_quantized_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    report = oxytorch.quantize_(model, Int8Weight())
    assert [layer.module for layer in report.layers] == ["0"]
    assert model[0].weight is model[2].weight
    with torch.no_grad():
        assert model(torch.randn(2, 64)).isfinite().all()
    oxytorch.undo(model)
    assert model[0].weight is model[2].weight and is_plain(model[2])


def test_the_output_head_is_left_unless_it_is_named() -> None:
    model = TiedEmbedding(96, 64)
    report = oxytorch.quantize_(model, Int8Weight())
    assert [layer.module for layer in report.layers] == ["body"]
    assert {e.module: e.detail for e in report.skipped}["head"].startswith("output head")
    assert model.head.weight is model.embed.weight


def test_an_embedding_tied_to_a_quantized_head_stays_plain() -> None:
    model = TiedEmbedding(96, 64)
    plain = model.embed.weight
    before = plain.detach().clone()
    report = oxytorch.quantize_(model, Int8Weight(), filter=["head", "body"])
    assert model.embed.weight is plain and torch.equal(plain, before)
    assert type(model.head.weight) is PanelWeight
    detail = {e.module: e.detail for e in report.applied}["head"]
    assert "beside the plain weight of embed" in detail
    with torch.no_grad():
        wanted = F.linear(model.body(model.embed.weight[:3]).tanh(), model.head.weight.dense())
        torch.testing.assert_close(model(torch.arange(3)), wanted, rtol=1e-3, atol=1e-3)
    oxytorch.undo(model)
    assert model.head.weight is model.embed.weight is plain


def test_conv1d_of_transformers_is_a_linear_layer() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(pytorch_utils.Conv1D(48, 64)).to(dtype)
        with torch.no_grad():
            model[0].weight.mul_(50)
        plain = model[0].weight.detach().clone()
        report = oxytorch.quantize_(model, Int8Weight())
        assert report.layers[0].shape == (48, 64)
        assert model[0].weight.shape == (64, 48)
        assert (model.state_dict()["0.weight"] - plain).norm() < 0.02 * plain.norm()
        x = torch.randn(3, 64).to(dtype)
        with torch.no_grad():
            wanted = x @ model[0].weight.dense() + model[0].bias
            torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=2e-2)
            same = copy.deepcopy(model)
            assert torch.equal(same(x), model(x))
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        assert (model.state_dict()["0.weight"] - 2 * plain).norm() < 0.03 * plain.norm()


def test_attention_of_torch_keeps_its_weights() -> None:
    model = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).eval()
    report = oxytorch.quantize_(model, Int8Weight())
    assert report.layers == []
    assert any("its parent reads its weights itself" in e.detail for e in report.skipped)


def test_save_pretrained_writes_plain_weights(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    oxytorch.quantize_(model, Int4Weight(group_size=64))
    model.save_pretrained(tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_progress_is_told(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int, str]] = []
    oxytorch.quantize_(small, Int8Weight(), progress=lambda *step: told.append(step))
    assert told == [(0, 2, "up"), (1, 2, "down"), (2, 2, "")]
    oxytorch.undo(small)
    oxytorch.quantize_(small, Int8Weight(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "1/2 down" in shown.err and shown.err.endswith("2/2 \n")


def _poison(model: Any) -> None:
    with torch.no_grad():
        model.down.weight[3, 5] = torch.nan


ERRORS: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
    (
        ValueError,
        "quantize_: expected a group_size that divides in_features 100 of odd, got 64",
        lambda m: m.add_module("odd", nn.Linear(100, 8)),
        Int4Weight(group_size=64),
        {},
    ),
    (ValueError, "finite values in down.weight, got NaN", _poison, Int4Weight(), {}),
    (ValueError, "expected filter to name modules of the model, got 'uup'", None, Int8Weight(),
     {"filter": ["up", "uup"]}),
    (TypeError, "expected filter to be a list of names, got [3]", None, Int8Weight(),
     {"filter": [3]}),
    (TypeError, "expected filter to be a list of names, got 3", None, Int8Weight(), {"filter": 3}),
    (TypeError, "quantize_: expected calibration to be a list of inputs, got a int", None,
     Int4Weight(), {"calibration": 3}),
    (TypeError, "expected a configuration such as Int4Weight(), got the class", None, Int4Weight,
     {}),
    (TypeError, "expected config to be Int8Weight(), Int4Weight()", None, "int4", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "prepare", "config", "options"), ERRORS)
def test_errors_come_before_anything_is_changed(
    small: Any, kind: type[Exception], text: str, prepare: Any, config: Any, options: Any
) -> None:
    if prepare is not None:
        prepare(small)
    before = dict(small.named_parameters())
    with pytest.raises(kind) as caught:
        oxytorch.quantize_(small, config, **options)
    assert text in str(caught.value)
    after = dict(small.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert is_plain(small.up) and is_plain(small.down)


def test_too_little_memory_is_told_before_work_starts(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError) as caught:
        oxytorch.quantize_(small, Int4Weight())
    # The codes of the larger layer, a byte each, beside its panels and scales.
    needed = memory.size_text(128 * 256 + 128 * 256 // 2 + 128 * 4 + 128 * 2 * 2)
    assert str(caught.value) == (
        f"quantize_: expected {needed} of free memory for 2 quantized layers, got 1000 bytes"
    )
    assert is_plain(small.up)


STREAMING = """
import re, torch
from pathlib import Path
from torch import nn
import oxytorch
from oxytorch.quantization import Int8Weight

def resident(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

oxytorch.quantize_(nn.Linear(64, 64), Int8Weight())
torch.set_default_dtype(torch.bfloat16)
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
oxytorch.quantize_(model, Int8Weight())
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc")
def test_memory_never_holds_much_more_than_the_model() -> None:
    result = subprocess.run([sys.executable, "-c", STREAMING], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # A layer's codes and panels are 8 MiB together; all panels beside all plain weights were 96.
    assert int(result.stdout) < 40


def test_free_memory_is_known_here() -> None:
    free = memory.available_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


CONFIG_ERRORS = [
    (lambda: Int4Weight(group_size=48), "Int4Weight: expected group_size 32, 64, 128, 256 or None"),
    (lambda: Int8Weight(group_size=True), "Int8Weight: expected group_size"),
    (lambda: NF4Weight(symmetric=False), "NF4Weight: expected symmetric=True, got False"),
    (lambda: Float8Weight(symmetric=False), "Float8Weight: expected symmetric=True, got False"),
    (lambda: Float8Weight(block_size=(128,)), "expected block_size of outputs, at least 1"),  # type: ignore[arg-type]
    (lambda: Float8Weight(block_size=(128, 100)), "inputs, one of 32, 64, 128, 256, got (128, 100"),
    (lambda: Float8Weight(block_size=(0, 128)), "expected block_size of outputs, at least 1"),
    (lambda: Float8Weight(32, block_size=(128, 128)), "expected group_size None or 128"),
    (lambda: Int4Weight(symmetric="yes"), "expected symmetric True or False, got 'yes'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "text"), CONFIG_ERRORS)
def test_configurations_check_themselves(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert text in str(caught.value)


def test_foreseen_sizes_are_the_real_ones() -> None:
    for config in MOST_ERROR:
        model = nn.Sequential(nn.Linear(256, 40, bias=False))
        oxytorch.quantize_(model, config)
        assert model[0].weight.nbytes_packed() == config.nbytes(40, 256)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_the_layer_itself_is_named(value: float) -> None:
    with pytest.raises(
        ValueError, match="in_features 64 of the Linear, got 128; group_size=64 fits"
    ):
        oxytorch.quantize_(nn.Linear(64, 8), Int4Weight(group_size=128))
    with pytest.raises(ValueError, match=r"in_features 64 .*; block_size=\(16, 64\) fits"):
        oxytorch.quantize_(nn.Linear(64, 8), Float8Weight(block_size=(16, 128)))
    layer = nn.Linear(64, 8)
    with torch.no_grad():
        layer.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"expected finite values in weight, got NaN or infinity"):
        oxytorch.quantize_(layer, Int8Weight())


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_any_dtype_are_taken_in_every_mode(
    dtype: torch.dtype, given: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32)).eval().to(dtype)
    oxytorch.quantize_(layer, Int8Weight())
    x = torch.randn(5, 64).to(given)
    with torch.no_grad():
        wanted = layer(x)
    found = layer(x)
    assert wanted.dtype == found.dtype == given
    assert found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
