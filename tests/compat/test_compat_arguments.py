"""The predecessor's arguments mean what they meant, or say what to do."""

from __future__ import annotations

import copy
import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
import oxytorch.compat.ipex as ipex
from oxytorch.compat import NotServedError
from oxytorch.compat.qconfigs import settings_of
from oxytorch.quantization import (
    Int4Weight,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8Weight,
    NF4Weight,
)

X = torch.randn(8, 64)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 8)
    ).eval()


def passes_of(model: nn.Module) -> list[str]:
    return oxytorch.explain(model).passes


def test_default_call_is_the_plain_one_without_a_wrapper() -> None:
    model = network()
    ours, theirs = oxytorch.optimize(model), ipex.optimize(model)
    assert type(theirs) is type(ours) is nn.Sequential
    assert passes_of(theirs) == passes_of(ours)
    assert theirs.__dict__.keys() == ours.__dict__.keys()
    assert not theirs._forward_pre_hooks and not theirs._forward_hooks


def test_levels_and_knobs_choose_passes() -> None:
    assert passes_of(ipex.optimize(network(), level="O0")) == ["cast"]
    assert "pack" in passes_of(ipex.optimize(network(), level="O0", weights_prepack=True))
    for knob, name in {
        "conv_bn_folding": "fold",
        "linear_bn_folding": "fold",
        "weights_prepack": "pack",
        "replace_dropout_with_identity": "dropout",
        "optimize_lstm": "lstm",
    }.items():
        found = passes_of(ipex.optimize(network(), **{knob: False}))
        assert name not in found and len(found) > 3, knob
    with pytest.raises(ValueError, match="O1"):
        ipex.optimize(network(), level="O2")
    with pytest.raises(ValueError, match="dtype"):
        ipex.optimize(network(), dtype=torch.float64)


def test_results_are_those_of_the_model_for_all_knobs() -> None:
    model = network()
    with torch.no_grad():
        expected = model(X)
        for options in (
            {"level": "O0"},
            {"weights_prepack": False},
            {"sample_input": X},
            {"sample_input": (X,), "graph_mode": True},
            {"auto_kernel_selection": True, "concat_linear": True},
            {"inplace": True},
        ):
            torch.testing.assert_close(ipex.optimize(copy.deepcopy(model), **options)(X), expected)


def test_inplace_false_leaves_the_model_alone() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = ipex.optimize(model, dtype=torch.bfloat16)
    assert result is not model and model[0].weight.dtype == torch.float32
    torch.testing.assert_close(model.state_dict(), before)
    assert ipex.optimize(model, inplace=True) is model


def test_scripted_modules_are_returned_as_they_are() -> None:
    scripted = torch.jit.script(network())
    assert ipex.optimize(scripted) is scripted


def test_converted_models_compute_in_their_dtype_within_autocast() -> None:
    model = network()
    fast = ipex.optimize(model, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        fast(X)
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            fast(torch.randn(8, 3))
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        outside = fast(X)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fast(X), outside, rtol=0, atol=0)


def test_training_keeps_pairs_and_optimizers() -> None:
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in (
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "split_master_weight_for_bf16": False, "level": "O0"},
    ):
        trained, own = ipex.optimize(model, optimizer=optimizer, **options)
        assert trained is not model and own.param_groups[0]["lr"] == 0.1
    same = ipex.optimize(model, optimizer=optimizer, fuse_update_step=False)
    assert same == (model, optimizer)
    with pytest.raises(ValueError, match="training mode"):
        ipex.optimize(model)
    with pytest.raises(ValueError, match=r"model.train\(\)"):
        ipex.optimize(network(), optimizer=optimizer)


def test_graph_mode_is_recorded_at_the_first_call() -> None:
    model = network()
    fast = ipex.optimize(model, graph_mode=True)
    with pytest.raises(ValueError):
        oxytorch.explain(fast)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X))
    assert "program" in passes_of(fast) and not fast._forward_pre_hooks
    model[0].weight.data.zero_()
    assert fast[0].weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, Int8Weight(symmetric=False)),
        ({"weight_dtype": 2, "group_size": 128}, Int4Weight(128, symmetric=False)),
        ({"weight_dtype": 2, "weight_qscheme": 2}, Int4Weight(None, symmetric=True)),
        ({"weight_dtype": 3, "group_size": 64}, NF4Weight(64)),
        ({"lowp_mode": 3}, Int8DynamicActivationInt8Weight(symmetric=True)),
        (
            {"weight_dtype": 2, "lowp_mode": 3, "group_size": 32},
            Int8DynamicActivationInt4Weight(32, symmetric=False),
        ),
    ],
)
def test_weight_only_settings_are_configurations(options: dict[str, Any], config: Any) -> None:
    assert ipex.quantization.get_weight_only_quant_qconfig_mapping(**options).config == config


def test_static_quantization_in_place_says_what_to_do() -> None:
    quantization = ipex.quantization
    with pytest.raises(NotServedError, match="prepared = prepare"):
        quantization.prepare(network(), quantization.default_static_qconfig_mapping, X, True)
    with pytest.raises(ValueError, match="example_inputs"):
        quantization.prepare(network(), quantization.default_static_qconfig)
    with pytest.raises(TypeError, match="QConfigMapping"):
        quantization.prepare(network(), "int8", X)
    with pytest.raises(ValueError, match="prepare"):
        quantization.convert(network())


def test_language_models_lead_on() -> None:
    from tiny import tiny_llama

    model = tiny_llama().eval()
    refused: dict[str, Any] = {
        "dtype": torch.float16,
        "device": "xpu",
        "qconfig_summary_file": "a.json",
        "low_precision_checkpoint": ({}, {}),
        "quantization_config": ipex.quantization.default_static_qconfig_mapping,
    }
    for name, value in refused.items():
        with pytest.raises(NotServedError, match=name):
            ipex.llm.optimize(model, **{name: value})
    with pytest.warns(UserWarning, match="inference"):
        assert ipex.llm.optimize(model.train()) == (model, None)
    assert isinstance(ipex.llm.optimize(network()), nn.Sequential)
    with pytest.warns(DeprecationWarning):
        ipex.optimize_transformers(network())


def test_pools_leave_out_cores_that_may_not_be_used() -> None:
    usable = sorted(os.sched_getaffinity(0))
    pool = ipex.cpu.runtime.CPUPool([*usable, 10_000])
    assert pool.core_ids == tuple(usable) and isinstance(pool, oxytorch.runtime.CPUPool)
    with pytest.raises(RuntimeError, match="may use"):
        ipex.cpu.runtime.CPUPool([10_000])
    assert ipex.cpu.runtime.CPUPool().core_ids == tuple(usable)


@pytest.mark.parametrize(
    ("path", "names"),
    {
        "optimize": "model dtype optimizer level inplace conv_bn_folding linear_bn_folding "
        "weights_prepack replace_dropout_with_identity optimize_lstm split_master_weight_for_bf16 "
        "fuse_update_step auto_kernel_selection sample_input graph_mode concat_linear",
        "llm.optimize": "model optimizer dtype inplace device quantization_config "
        "qconfig_summary_file low_precision_checkpoint sample_inputs deployment_mode "
        "cache_weight_for_large_batch",
        "quantization.prepare": "model configure example_inputs inplace bn_folding "
        "example_kwarg_inputs",
        "quantization.convert": "model inplace",
        "quantization.autotune": "model calib_dataloader calib_func eval_func op_type_dict "
        "sampling_sizes accuracy_criterion tuning_time",
        "quantization.get_smooth_quant_qconfig_mapping": "alpha act_observer act_ic_observer "
        "wei_observer wei_ic_observer share_weight_observers",
        "cpu.runtime.CPUPool": "core_ids node_id",
        "cpu.runtime.MultiStreamModule": "model num_streams cpu_pool concat_output "
        "input_split_hint output_concat_hint",
        "optim._lamb.Lamb": "params lr betas eps weight_decay fused",
        "optim._lars.create_optimizer_lars": "model lr momentum weight_decay bn_bias_separately "
        "epsilon",
        "nn.FrozenBatchNorm2d": "num_features eps",
        "llm.functional.rotary_embedding": "query key sin cos rotary_dim rotary_half position_ids",
        "llm.functional.add_rms_norm": "residual x weight bias eps add_back",
    }.items(),
)
def test_arguments_have_the_predecessors_names_and_order(path: str, names: str) -> None:
    value: Any = ipex
    for part in path.split("."):
        value = getattr(value, part)
    assert [*inspect.signature(value).parameters][: len(names.split())] == names.split()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: oxytorch.optimize(network(), weights_prepack=True), "pack"),
        (lambda: oxytorch.optimize(network(), graph_mode=True), "graph=True"),
        (lambda: oxytorch.llm.optimize(network(), deployment_mode=True), "nothing is traced"),
        (lambda: oxytorch.quantization.prepare(network(), configure=1), "config="),
        (lambda: oxytorch.quantization.convert(network(), inplace=True), "copy"),
        (lambda: oxytorch.quantization.autotune(network(), eval_func=1), "evaluate="),
    ],
)
def test_keywords_of_the_predecessor_lead_on(call: Any, word: str) -> None:
    with pytest.raises(TypeError, match="intel_extension_for_pytorch") as raised:
        call()
    assert word in str(raised.value)


def test_levels_are_those_of_oxytorch() -> None:
    active = ipex._C._get_current_isa_level()
    assert active == oxytorch.isa.active().upper()
    names = [level.name.upper() for level in oxytorch.isa.levels()] or [active]
    assert ipex._C._get_highest_cpu_support_isa_level() in names
    assert ipex._C._get_highest_binary_support_isa_level() in names


def test_verbose_off_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with ipex.verbose(ipex.verbose.VERBOSE_OFF):
        nn.Linear(4, 4)(torch.ones(1, 4))
    assert capfd.readouterr().out == ""
    with pytest.raises(ValueError, match="level"):
        ipex.verbose(3)


def test_switches_have_no_other_effect() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ipex.disable_auto_channels_last()
        ipex.enable_auto_channels_last()
        ipex.set_logging_level("WARNING")
    with pytest.raises(NotServedError, match="BF32"):
        ipex.set_fp32_math_mode(ipex.FP32MathMode.TF32)
    with pytest.raises(NotServedError, match="GPU"):
        ipex.get_fp32_math_mode(device="xpu")
    with ipex.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_the_older_spelling_of_a_dynamic_observer() -> None:
    quantization = torch.ao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer = quantization.PlaceholderObserver.with_args(
            dtype=torch.float, compute_dtype=torch.quint8
        )
        found = settings_of(quantization.QConfig(activation=observer, weight=None))
    assert isinstance(found, Int8DynamicActivationInt8Weight)


def test_recipe_files_of_the_predecessor_lead_on(tmp_path: Path) -> None:
    prepared = ipex.quantization.prepare(
        network(), ipex.quantization.default_static_qconfig_mapping, X
    )
    path = tmp_path / "configure.json"
    tensor = {"id": 0, "orig_dtype": "torch.float32", "force_dtype": "torch.float32"}
    operators = {
        "0": {"op_type": "Linear", "fqn": "0", "input_tensor_infos": [tensor]},
        "1": {"op_type": "Linear", "fqn": "2", "input_tensor_infos": [
            {**tensor, "force_dtype": "torch.quint8"}]},
    }  # fmt: skip
    path.write_text(json.dumps({" ": {"q_op_infos": operators, "nonq_op_infos": {}}}))
    with pytest.raises(NotServedError, match=r"recipe_of\(prepared\)\.set\('0', 'float'\)\)"):
        prepared.load_qconf_summary(qconf_summary=str(path))
    path.write_text('{"layers": 1}')
    with pytest.raises(ValueError, match='expected "format"'):
        prepared.load_qconf_summary(qconf_summary=str(path))
