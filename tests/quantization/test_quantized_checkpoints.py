"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8 give the weights that these describe."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import packers
import pytest
import torch
from hypothesis import strategies as st
from loading import BIAS, IN, OUT, Layer, check, loaded, replaced, without
from torch import nn
from torch.nn import functional as F

import oxytorch
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import CheckpointError
from oxytorch.quantization.checkpoints import scheme_of
from tiny import tiny_llama


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_gives_the_described_weights(
    tmp_path: Path, bits: int, groups: int, symmetric: bool, version: int
) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, groups, bits, symmetric=symmetric)
    tensors = packers.gptq("fc", codes, scales, zeros, bits=bits, version=version)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": IN // groups if groups > 1 else -1,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    layer = loaded(tmp_path, tensors, settings)
    check(layer, packers.values(codes, scales, zeros))
    assert isinstance(layer.weight, PanelWeight)
    assert (layer.weight.zero_points is None) == symmetric


def test_gptq_with_act_order_multiplies_the_right_columns(tmp_path: Path) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, 4, 4)
    group_of = np.random.default_rng(1).permutation(np.arange(IN) // (IN // 4))
    tensors = packers.gptq("fc", codes, scales, zeros, bits=4, group_of=group_of)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    layer = loaded(tmp_path, tensors, settings)
    check(layer, packers.values(codes, scales, zeros, group_of))
    saved = tmp_path / "saved"
    model = Layer()
    model.fc = layer
    oxytorch.save_quantized(model, saved)
    again = oxytorch.load_quantized(saved, Layer)
    check(again.fc, packers.values(codes, scales, zeros, group_of))  # type: ignore[arg-type]


def test_gptq_with_larger_groups_than_kernels_know_is_cut(tmp_path: Path) -> None:
    codes, scales, zeros = packers.random_codes(OUT, 1024, 2, 4)
    model = nn.Sequential(nn.Linear(1024, OUT, bias=False))
    directory = packers.write(
        tmp_path / "model",
        packers.gptq("0", codes, scales, zeros, bits=4),
        {"quant_method": "gptq", "bits": 4, "group_size": 512},
    )
    oxytorch.load_quantized(directory, model)
    assert torch.equal(model[0].weight.dense(), packers.values(codes, scales, zeros))


def test_gptq_drops_a_bias_of_zeros_that_the_model_lacks(tmp_path: Path) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, 2, 4)
    tensors = packers.gptq("0", codes, scales, zeros, bits=4)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    bias = {"0.bias": torch.zeros(OUT)}
    oxytorch.load_quantized(packers.write(tmp_path / "a", {**tensors, **bias}, settings), model)
    assert isinstance(model[0].weight, PanelWeight)
    other = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    directory = packers.write(tmp_path / "b", {**tensors, "0.bias": BIAS}, settings)
    with pytest.raises(CheckpointError, match=r"got '0\.bias', which Sequential does not have"):
        oxytorch.load_quantized(directory, other)


@pytest.mark.parametrize("groups", [1, 4])
def test_awq_gives_the_described_weights(tmp_path: Path, groups: int) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, groups, 4)
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": IN // groups,
        "version": "gemm",
        "zero_point": True,
    }
    check(
        loaded(tmp_path, packers.awq("fc", codes, scales, zeros), settings),
        packers.values(codes, scales, zeros),
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_compressed_tensors_give_the_described_weights(
    tmp_path: Path, bits: int, groups: int, symmetric: bool
) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, groups, bits, symmetric=symmetric)
    tensors = packers.compressed("fc", codes, scales, None if symmetric else zeros, bits=bits)
    size = IN // groups if groups > 1 else None
    layer = loaded(tmp_path, tensors, packers.compressed_settings(bits, symmetric, size))
    check(layer, packers.values(codes, scales, zeros))


def test_packed_compressed_tensors_with_act_order(tmp_path: Path) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, 2, 4, symmetric=True)
    group_of = np.random.default_rng(1).permutation(np.arange(IN) // (IN // 2))
    tensors = packers.compressed("fc", codes, scales, None, bits=4, group_of=group_of)
    layer = loaded(tmp_path, tensors, packers.compressed_settings(4, True, 128))
    check(layer, packers.values(codes, scales, zeros, group_of))


@pytest.mark.parametrize("has_zeros", [True, False])
def test_int8_compressed_tensors_quantize_activations(tmp_path: Path, has_zeros: bool) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, 1, 8, symmetric=not has_zeros)
    tensors = {
        "fc.weight": packers.tensor((codes - 128).astype(np.int8)),
        "fc.weight_scale": packers.tensor(scales),
    }
    if has_zeros:
        tensors["fc.weight_zero_point"] = packers.tensor((zeros - 128).astype(np.int8))
    settings = packers.compressed_settings(
        8, not has_zeros, None, "int-quantized", input_activations=INPUTS
    )
    layer = loaded(tmp_path, tensors, settings)
    wanted = packers.values(codes, scales, zeros)
    assert torch.equal(layer.weight.dense(), wanted)  # type: ignore[operator]
    assert layer.weight.activation_dtype == "int8"
    x = torch.randn(4, IN)
    with torch.no_grad():
        error = (layer(x) - F.linear(x, wanted, BIAS)).norm() / F.linear(x, wanted).norm()
    assert 1e-4 < error < 2e-2


def test_a_group_for_names_wins_over_the_one_for_kinds(tmp_path: Path) -> None:
    codes, scales, _ = packers.random_codes(OUT, IN, 1, 8, symmetric=True)
    settings = packers.compressed_settings(4, True, None)
    named = packers.compressed_settings(8, True, None)["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = {**named, "targets": ["re:.*fc$"]}
    tensors = packers.compressed("fc", codes, scales, None, bits=8)
    check(loaded(tmp_path, tensors, settings), packers.values(codes, scales, scales * 0 + 128))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
INPUTS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}

SETTINGS = [
    ({"quant_method": "bitnet"}, "quant_method to be one of gptq, awq, compressed-tensors, fp8"),
    ({**packers.FP8, "fmt": "e5m2"}, "fmt 'e4m3' or 'float8_e4m3fn', got 'e5m2'"),
    (
        {**packers.FP8, "activation_scheme": "none"},
        "activation_scheme 'dynamic' or 'static', got 'none'",
    ),
    (
        {**packers.FP8, "weight_block_size": [128]},
        "weight_block_size null or two sizes above 0, got [128]",
    ),
    (packers.float8_settings("block"), "weights.block_structure two sizes above 0, got None"),
    (packers.float8_settings("token"), "strategy one of ('channel', 'group', 'tensor', 'block')"),
    (packers.float8_settings("channel", symmetric=False), "symmetric one of (True, None), got"),
    (
        packers.compressed_settings(8, True, None, "float-quantized"),
        "weights.type one of ('float',), got 'int'",
    ),
    ({**GPTQ, "bits": 3}, "quantization_config.bits 4 or 8, got 3"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'gptq' or 'gptq_v2', got"),
    ({"quant_method": "awq", "bits": 8}, "quantization_config.bits 4, got 8"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemm', got 'gemv'"),
    ({"quant_method": "compressed-tensors"}, "config_groups to hold at least one group, got None"),
    (
        packers.compressed_settings(4, True, None, "nvfp4-pack-quantized"),
        "format one of pack-quantized, int-quantized, float-quantized, got 'nvfp4-pack-quantized'",
    ),
    (packers.compressed_settings(3, True, None), "num_bits one of (4, 8), got 3"),
    (
        packers.compressed_settings(8, True, None, input_activations={"num_bits": 8}),
        "input_activations of type int, 8 bits and dynamic",
    ),
    (packers.compressed_settings(4, True, None, targets=["re:("]), "targets with patterns"),
    (None, "expected a quantization_config, got None; load a plain model"),
]


@pytest.mark.parametrize(("settings", "text"), SETTINGS)
def test_unknown_settings_are_named(tmp_path: Path, settings: Any, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, {"fc.weight": torch.zeros(OUT, IN)}, settings)
    assert text in str(caught.value)
    assert "config.json" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "int", "re:(", "gptq"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "type"]), inner)
    ),
    max_leaves=4,
)


def _paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [path]
    return [path] * bool(path) + [p for k, v in value.items() for p in _paths(v, (*path, k))]


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(data=st.data())
def test_settings_of_any_kind_give_errors_and_no_crash(data: st.DataObject) -> None:
    value = data.draw(
        st.sampled_from(
            [
                GPTQ,
                AWQ,
                packers.FP8_BLOCKS,
                packers.compressed_settings(8, True, None, input_activations=INPUTS),
                packers.float8_settings("block", block_structure=[128, 128]),
            ]
        )
    )
    changed = copy.deepcopy(value)
    *way, last = data.draw(st.sampled_from(_paths(changed)))
    place = changed
    for key in way:
        place = place[key]
    place[last] = data.draw(JSON)
    try:
        scheme_of(changed, "config.json")
    except CheckpointError as error:
        assert str(error).startswith("config.json: expected quantization_config")


DAMAGES = [
    (without("fc.qzeros"), "expected a tensor 'fc.qzeros', found none"),
    (without("fc.scales"), "expected a tensor 'fc.scales', found none"),
    (without("fc.bias"), "found none for 'fc.bias'"),
    (lambda t: t.update(more=torch.ones(2)), "got 'more', which Layer does not have"),
    (replaced("fc.bias", lambda t: t[1:].clone()), "tensor 'fc.bias' of shape [48], got [47]"),
    (replaced("fc.qweight", lambda t: t[:, 1:].clone()), "'fc.qweight' to be int32 [32, 48]"),
    (replaced("fc.qweight", lambda t: t[1:].clone()), "expected tensor 'fc.qweight'"),
    (replaced("fc.qweight", lambda t: t.float()), "'fc.qweight' to be int32 [32, 48], got float32"),
    (replaced("fc.qzeros", lambda t: t[:1].clone()), "'fc.qzeros' to be int32 [2, 6], got"),
    (replaced("fc.scales", lambda t: t[:, 1:].clone()), "'fc.scales' to be float16 or"),
    (replaced("fc.scales", lambda t: t.repeat(2, 1)[:3].clone()), "that divides in_features 256"),
    (replaced("fc.scales", lambda t: t * torch.inf), "finite values in tensor 'fc.scales'"),
    (replaced("fc.bias", lambda t: t * torch.nan), "finite values in tensor 'fc.bias'"),
    (replaced("fc.g_idx", lambda t: t * 0), "expected tensor 'fc.g_idx' to put 128 columns"),
    (replaced("fc.g_idx", lambda t: t - 7), "expected tensor 'fc.g_idx' to put 128 columns"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_damaged_tensors_are_named_and_the_model_stays(
    tmp_path: Path, damage: Any, text: str
) -> None:
    codes, scales, zeros = packers.random_codes(OUT, IN, 2, 4)
    tensors = {**packers.gptq("fc", codes, scales, zeros, bits=4), "fc.bias": BIAS}
    damage(tensors)
    directory = packers.write(tmp_path / "model", tensors, GPTQ)
    model = Layer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        oxytorch.load_quantized(directory, model)
    assert text in str(caught.value)
    assert type(model.fc.weight) is nn.Parameter and "forward" not in model.fc.__dict__
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    codes, scales, zeros = packers.random_codes(OUT, IN, 2, 4)
    tensors = {**packers.gptq("fc", codes, scales, zeros, bits=4), "fc.bias": BIAS}
    directory = packers.write(tmp_path / "model", tensors, GPTQ)
    (directory / "model.safetensors").unlink()
    places = {}
    for index, name in enumerate(sorted(tensors)):
        places[name] = f"part-{index % 2}.safetensors"
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, directory / file)
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(packers.json.dumps({"weight_map": places}))
    model = oxytorch.load_quantized(directory, Layer)
    check(model.fc, packers.values(codes, scales, zeros))  # type: ignore[arg-type]
    for wrong, text in (("../x", "files in the same directory"), ("no", "expected a file")):
        index_file.write_text(packers.json.dumps({"weight_map": {**places, "fc.bias": wrong}}))
        with pytest.raises(CheckpointError, match=text):
            oxytorch.load_quantized(directory, Layer)


def test_a_language_model_is_made_from_its_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain = tiny_llama(
        hidden_size=128, intermediate_size=256, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"], dtype="float16",
    ).bfloat16()  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for path, module in plain.named_modules():
        if type(module) is nn.Linear and path != "lm_head":
            out, columns = module.weight.shape
            codes, scales, zeros = packers.random_codes(out, columns, columns // 64, 4)
            tensors |= packers.gptq(path, codes, scales, zeros, bits=4)
            with torch.no_grad():
                module.weight.copy_(packers.values(codes, scales, zeros))
        elif isinstance(getattr(module, "weight", None), torch.Tensor) and path != "lm_head":
            tensors[f"{path}.weight"] = module.weight.detach().to(torch.float16)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    directory = packers.write(tmp_path / "model", tensors, settings, plain.config.to_dict())
    model = oxytorch.load_quantized(directory)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(12)[None]
    with torch.no_grad():
        difference = (model(ids).logits - plain(ids).logits).float()
        assert difference.norm() < 0.02 * plain(ids).logits.float().norm()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 14)
