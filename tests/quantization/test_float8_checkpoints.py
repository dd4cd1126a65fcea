"""Checkpoints of weights in E4M3: of fp8, as DeepSeek publishes them, and of compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from loading import IN, OUT, check, loaded, replaced, without
from torch import nn

import oxytorch
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import CheckpointError
from tiny import tiny_llama


def _random_scales(*shape: int, seed: int = 2) -> torch.Tensor:
    """Scales of float32, which fewer bits do not hold."""
    return packers.tensor(np.random.default_rng(seed).random(shape, dtype=np.float32)) / 5000


@pytest.mark.parametrize("block", [(128, 128), (32, 64), (128, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_fp8_give_the_described_weights(
    tmp_path: Path, dtype: torch.dtype, block: tuple[int, int]
) -> None:
    """The outputs are a part of a block; a block of 512 inputs is more than there are."""
    codes = packers.random_float8(OUT, IN)
    scales = _random_scales(-(-OUT // block[0]), -(-IN // block[1])).to(dtype)
    tensors = packers.float8("fc", codes, scales, "weight_scale_inv")
    settings = {**packers.FP8_BLOCKS, "weight_block_size": [*block]}
    layer = loaded(tmp_path, tensors, settings)
    check(layer, packers.float8_values(codes, scales.float().numpy(), block))
    assert isinstance(layer.weight, PanelWeight)
    assert (layer.weight.format, layer.weight.activation_dtype) == ("fp8", None)


@pytest.mark.parametrize(("outputs", "columns", "size"), [(320, 192, 64), (130, 1024, 128)])
def test_the_last_block_may_be_smaller(
    tmp_path: Path, outputs: int, columns: int, size: int
) -> None:
    codes = packers.random_float8(outputs, columns)
    scales = _random_scales(-(-outputs // 128), -(-columns // 128))
    directory = packers.write(
        tmp_path / "model",
        packers.float8("0", codes, scales, "weight_scale_inv"),
        packers.FP8_BLOCKS,
    )
    model = nn.Sequential(nn.Linear(columns, outputs, bias=False))
    oxytorch.load_quantized(directory, model)
    wanted = packers.float8_values(codes, scales.numpy(), (128, 128))
    assert torch.equal(model[0].weight.dense(), wanted)
    assert model[0].weight.group_size == size
    saved = tmp_path / "saved"
    oxytorch.save_quantized(model, saved)
    again = oxytorch.load_quantized(saved, nn.Sequential(nn.Linear(columns, outputs, bias=False)))
    assert torch.equal(again[0].weight.dense(), wanted)  # type: ignore[index]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_fp8_with_one_scale_leaves_activations_alone(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    codes, scale = packers.random_float8(OUT, IN), _random_scales(*shape)
    tensors = packers.float8("fc", codes, scale, name)
    tensors |= {"fc.activation_scale": torch.ones(()), "fc.input_scale": torch.ones(1)}
    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    check(
        loaded(tmp_path, tensors, settings),
        packers.float8_values(codes, scale.reshape(1, 1).numpy()),
    )


STRATEGIES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("tensor", (1,), {}),
    ("tensor", (), {}),
    ("channel", (OUT, 1), {}),
    ("group", (OUT, 2), {"group_size": 128}),
    ("group", (OUT, 8), {"group_size": 32}),
    ("block", (1, 2), {"block_structure": [128, 128]}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("strategy", "shape", "more"), STRATEGIES)
def test_floats_of_compressed_tensors_give_the_described_weights(
    tmp_path: Path,
    strategy: str,
    shape: tuple[int, ...],
    more: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    codes, scales = packers.random_float8(OUT, IN), _random_scales(*shape).to(dtype)
    tensors = packers.float8("fc", codes, scales, "weight_scale")
    settings = packers.float8_settings(strategy, **more)
    inputs = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    settings["config_groups"]["group_0"]["input_activations"] = inputs
    tensors["fc.input_scale"] = torch.ones(1)
    whole = scales.float().reshape(1, 1) if strategy == "tensor" else scales.float()
    block = (128, 128) if strategy == "block" else None
    wanted = packers.float8_values(codes, whole.numpy(), block)
    layer = loaded(tmp_path, tensors, settings)
    check(layer, wanted)
    assert layer.weight.activation_dtype is None


FLOAT_DAMAGES = [
    (without("fc.weight_scale_inv"), "expected a tensor 'fc.weight_scale_inv', found none"),
    (
        replaced("fc.weight_scale_inv", lambda t: t[:, :1].clone()),
        "'fc.weight_scale_inv' to be float16 or bfloat16 or float32 or float8_e8m0fnu [1, 2], got",
    ),
    (
        replaced("fc.weight_scale_inv", lambda t: t * torch.nan),
        "finite values in tensor 'fc.weight_scale_inv'",
    ),
    (
        replaced("fc.weight", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype)),
        "expected finite values in tensor 'fc.weight', got NaN",
    ),
    (
        replaced("fc.weight", lambda t: t[1:].clone()),
        "'fc.weight' to be float8_e4m3fn [48, 256], got",
    ),
]


@pytest.mark.parametrize(("damage", "text"), FLOAT_DAMAGES)
def test_damaged_floats_are_named(tmp_path: Path, damage: Any, text: str) -> None:
    codes = packers.random_float8(OUT, IN)
    tensors = packers.float8("fc", codes, _random_scales(1, 2), "weight_scale_inv")
    damage(tensors)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, tensors, packers.FP8_BLOCKS)
    assert text in str(caught.value)


def test_scales_of_unknown_blocks_are_refused(tmp_path: Path) -> None:
    tensors = packers.float8(
        "fc", packers.random_float8(OUT, IN), _random_scales(1, 2), "weight_scale_inv"
    )
    with pytest.raises(CheckpointError, match=r"weight_block_size to tell what the scales of fc"):
        loaded(tmp_path, tensors, packers.FP8)
    with pytest.raises(CheckpointError, match=r"with a common divisor of 32.* got 48 and 256"):
        loaded(
            tmp_path,
            packers.float8(
                "fc", packers.random_float8(OUT, IN), _random_scales(1, 6), "weight_scale_inv"
            ),
            {**packers.FP8, "weight_block_size": [128, 48]},
        )


@pytest.mark.parametrize("optimized", [False, True])
def test_a_language_model_of_blocks_is_loaded_and_optimized(
    tmp_path: Path, optimized: bool
) -> None:
    """As DeepSeek publishes them: layers in blocks, the rest in bfloat16."""
    plain = tiny_llama(
        hidden_size=256, intermediate_size=320, architectures=["LlamaForCausalLM"], dtype="bfloat16"
    ).bfloat16()
    tensors: dict[str, torch.Tensor] = {}
    for number, (path, module) in enumerate(plain.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            out, columns = module.weight.shape
            codes = packers.random_float8(out, columns, number)
            scales = _random_scales(-(-out // 128), -(-columns // 128), seed=number) / 4
            tensors |= packers.float8(path, codes, scales, "weight_scale_inv")
            with torch.no_grad():
                module.weight.copy_(packers.float8_values(codes, scales.numpy(), (128, 128)))
        elif isinstance(getattr(module, "weight", None), torch.Tensor):
            tensors[f"{path}.weight"] = module.weight.detach()
    directory = packers.write(
        tmp_path / "model", tensors, packers.FP8_BLOCKS, plain.config.to_dict()
    )
    model: Any = oxytorch.load_quantized(directory)
    ids = torch.arange(12)[None]
    weight = model.model.layers[0].mlp.down_proj.weight
    assert (weight.format, weight.group_size) == ("fp8", 64)
    if optimized:
        model = oxytorch.llm.optimize(model)
        report = oxytorch.explain(model)
        assert report.fused == report.layers == 2  # type: ignore[attr-defined]
    with torch.no_grad():
        difference = (model(ids).logits - plain(ids).logits).float()
        assert difference.norm() < 0.02 * plain(ids).logits.float().norm()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 14)
