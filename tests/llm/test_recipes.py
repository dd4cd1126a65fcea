"""Every family's layers are recognized and give the model's own answers.

The tests take the transformers that is installed. To run them with an older release:
`pip install --no-deps --target DIR transformers==4.57.3 tokenizers==0.22.2 huggingface-hub==0.36.2
requests urllib3 certifi charset-normalizer`, then `PYTHONPATH=DIR pytest tests/llm`.
"""

from __future__ import annotations

import pytest
import torch
from language_models import FAMILIES, LEFT, build, distance, logits, prompt, tokens, usual_distance

import oxytorch
from oxytorch import llm
from oxytorch.llm.checking import Differs, choose
from oxytorch.llm.observing import decoder_layers, observe
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import Float8Weight, WeightConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_float32_are_the_models_own(family: str) -> None:
    model = build(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = llm.optimize(model, dtype=torch.float32)
    report = oxytorch.explain(fast)
    assert (report.fused, report.whole, report.skipped) == (report.layers, True, []), str(report)
    given = prompt()
    assert distance(logits(fast, given), logits(model, given)) < 1e-5
    assert torch.equal(tokens(fast, given), tokens(model, given))
    single = prompt(1)
    assert torch.equal(tokens(fast, single, num_beams=3), tokens(model, single, num_beams=3))
    state = fast.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_err_as_bfloat16_does(family: str) -> None:
    model = build(family)
    given = prompt()
    expected = logits(model, given)
    usual = usual_distance(logits(build(family, torch.bfloat16), given), expected)
    fast = llm.optimize(model)
    assert any(isinstance(weight, PanelWeight) for weight in fast.parameters())
    assert usual_distance(logits(fast, given), expected) <= 1.2 * usual


@pytest.mark.parametrize(
    ("weights", "group_size", "activation_dtype", "allowed"),
    [
        ("int8", None, None, 0.04),
        ("int8", None, "int8", 0.08),
        ("int4", 32, None, 0.4),
        ("int4", 32, "int8", 0.4),
        ("nf4", 32, None, 0.4),
        ("fp8", None, None, 0.15),
        (Float8Weight(block_size=(32, 32)), None, None, 0.15),
    ],
)
@pytest.mark.parametrize("family", ["llama", "phi3", "falcon_grouped", "mixtral", "gpt2"])
def test_quantized_weights_stay_near(
    family: str,
    weights: str | WeightConfig,
    group_size: int | None,
    activation_dtype: str | None,
    allowed: float,
) -> None:
    model = build(family)
    given = prompt()
    fast = llm.optimize(
        model, weights=weights, group_size=group_size, activation_dtype=activation_dtype
    )
    report = oxytorch.explain(fast)
    assert report.fused == report.layers == 2
    # Rounding decides between experts whose scores are nearly alike.
    assert report.whole or family == "mixtral", str(report)
    assert report.bytes_after < 0.8 * report.bytes_before
    assert usual_distance(logits(fast, given), logits(model, given)) < allowed


def test_cache_of_8_bits_stays_near() -> None:
    model = build("llama")
    given = prompt()
    plain, narrow = (llm.optimize(model, kv_cache=kind) for kind in ("bf16", "int8"))
    assert distance(logits(narrow, given), logits(plain, given)) < 0.02
    assert tokens(narrow, given).shape == (2, 10)


@pytest.mark.parametrize("family", LEFT)
def test_layers_that_differ_are_left_and_reported(family: str) -> None:
    model = build(family)
    fast = llm.optimize(model, dtype=torch.float32)
    report = oxytorch.explain(fast)
    assert report.fused == 0 and not report.whole
    assert len(report.skipped) == 2 and "left alone" in str(report)
    given = prompt()
    assert torch.equal(tokens(fast, given), tokens(model, given))
    packed = llm.optimize(model, weights="int8")
    assert "Linear packed" in {entry.detail for entry in oxytorch.explain(packed).applied}
    assert distance(logits(packed, given), logits(model, given)) < 0.05


def test_parts_of_a_layer_that_is_left_are_improved() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.__class__ = _louder(type(layer))
    given = prompt()
    fast = llm.optimize(model, weights="int8")
    report = oxytorch.explain(fast)
    done = {entry.detail for entry in report.applied}
    assert report.fused == 0 and len(report.differing) == 2
    assert done >= {"gated MLP as two products", "Linear packed", "LlamaRMSNorm in our kernel"}
    assert distance(logits(fast, given), logits(model, given)) < 0.05
    assert tokens(fast, given).shape == (2, 10)


def _louder(kind: type) -> type:
    class Louder(kind):  # type: ignore[misc]
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 1.0001

    return Louder


def test_a_small_change_of_a_layer_is_noticed() -> None:
    model = build("llama")
    layers = decoder_layers(model)
    observe(model, layers, model.config)
    plan, gap = choose(layers[0], model.config, None)
    assert plan.block_order == "norm, attention, norm, MLP" and gap < 1e-5
    layers[1].module.self_attn.scaling = 0.2501
    assert choose(layers[1], model.config, None)[0].scale == 0.2501  # read from the layer
    layers[1].module.__class__ = _louder(type(layers[1].module))
    with pytest.raises(Differs) as caught:
        choose(layers[1], model.config, None)
    assert caught.value.gap > 1e-5


def test_sinks_of_heads_are_read() -> None:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    AttentionInterface.register("test_sinks", eager_attention_forward)
    AttentionMaskInterface.register("test_sinks", eager_mask)
    model = build("llama")
    model.config._attn_implementation = "test_sinks"
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(4))
    fast = llm.optimize(model, dtype=torch.float32)
    assert oxytorch.explain(fast).fused == 2
    given = prompt()
    assert distance(logits(fast, given), logits(model, given)) < 1e-5
    assert torch.equal(tokens(fast, given), tokens(model, given))


def test_report_tells_what_was_done() -> None:
    text = str(oxytorch.explain(llm.optimize(build("gemma3"), weights="int8", kv_cache="int8")))
    assert "2 of 2 decoder layers run as a few ops each" in text
    assert "weights int8" in text and "cache int8" in text
    assert "a norm before and behind each part" in text
    assert "largest difference" in text and "left alone" not in text
