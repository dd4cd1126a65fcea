"""Families that are fused in part or not at all, whatever they keep of earlier tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import (
    MORE,
    STATES,
    VOCABULARY,
    build,
    distance,
    logits,
    prompt,
    tokens,
    usual_distance,
)

import oxytorch
from oxytorch import llm

transformers = pytest.importorskip("transformers")


def greedy(model: torch.nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The likeliest tokens, each from a call with all before it: what every cache has to give."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


_QUICK = ("opt_350m", "falcon_rotary_bias", "xglm", "exaone4", "roberta")
_QUICK += ("mamba", "jamba", "minimax", "openai_gpt", "rwkv")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in (*MORE, *STATES)
    ],
)
def test_every_family_is_taken_and_means_the_same(family: str) -> None:
    model = build(family)
    given = prompt(2, 17)
    ids = given["input_ids"]
    fast = llm.optimize(model, dtype=torch.float32)
    report = oxytorch.explain(fast)
    assert report.layers == report.fused + len(report.skipped)
    assert all(entry.detail.partition(": ")[2] for entry in report.skipped)  # each has its reason
    with torch.no_grad():
        assert distance(fast(ids).logits, model(ids).logits) < 1e-5
    single = {name: value[:1] for name, value in given.items()}
    assert torch.equal(tokens(fast, single), tokens(model, single))
    expected = greedy(model, ids, 6) if family != "roberta" else model.generate(
        ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids)
    )  # fmt: skip
    for one in (model, fast):
        assert torch.equal(llm.generate(one, ids, max_new_tokens=6, eos_token_id=[]), expected)


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "bamba", "minimax", "rwkv"])
def test_loss_of_a_text_is_that_of_the_models_own_forward(family: str) -> None:
    model = build(family)
    text = torch.randint(3, VOCABULARY, (33,))
    with torch.no_grad():
        scores = model(text[None, :-1]).logits[0]
    expected = torch.nn.functional.cross_entropy(scores, text[1:], reduction="none")
    found = llm.token_losses(model, text, window=32, chunk=5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "lfm2", "openai_gpt"])
def test_padded_prompts_are_as_in_generate(family: str) -> None:
    model = build(family)
    given = prompt(2, 12)
    options = {"max_new_tokens": 6, "pad_token_id": 0}
    expected = model.generate(**given, do_sample=False, **options)[:, 12:]
    assert torch.equal(llm.generate(model, **given, **options)[:, 12:], expected)


@pytest.mark.parametrize("family", ["xglm", "ctrl", "opt_350m", "jamba", "rwkv"])
def test_families_in_bfloat16_err_as_bfloat16_does(family: str) -> None:
    model = build(family)
    given = prompt(2, 17)
    expected = logits(model, given)
    usual = usual_distance(logits(build(family, torch.bfloat16), given), expected)
    for made in (llm.optimize(model), llm.optimize(build(family, torch.bfloat16))):
        assert usual_distance(logits(made, given), expected) <= 1.5 * usual
    eight = llm.optimize(model, weights="int8")
    assert usual_distance(logits(eight, given), expected) <= 1.5 * usual + 0.05
    oxytorch.undo(eight)
    assert all(b.dtype == torch.float32 for b in eight.buffers() if b.is_floating_point())


def test_groups_need_not_divide_what_is_no_layers_weight() -> None:
    """`A_log` of Mamba has as many columns as the state has numbers."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, state_size=16,
        time_step_rank=64, eos_token_id=None,
    )  # fmt: skip
    model, given = transformers.MambaForCausalLM(config).eval(), prompt(2, 12)
    four = llm.optimize(model, dtype=torch.float32, weights="int4", group_size=32)
    assert usual_distance(logits(four, given), logits(model, given)) < 0.3
    with pytest.raises(ValueError, match=r"in_features 64 of .*dt_proj.weight, got 128"):
        llm.optimize(model, weights="int4", group_size=128)


def test_what_reads_later_tokens_is_refused() -> None:
    config = transformers.XLNetConfig(
        d_model=64, n_layer=2, n_head=4, d_inner=128, vocab_size=VOCABULARY
    )
    model = transformers.XLNetLMHeadModel(config).eval()
    with pytest.raises(TypeError, match="reads later ones too; use its own generate"):
        llm.generate(model, torch.full((1, 4), 6), max_new_tokens=1)


def test_running_states_cannot_forget_guesses() -> None:
    with pytest.raises(ValueError, match="prompt_lookup needs a model that can forget tokens"):
        llm.generate(build("mamba"), torch.full((1, 4), 5), max_new_tokens=1, prompt_lookup=3)


def _encoder_decoder(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {"d_model": 64, "vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    ids = torch.randint(3, VOCABULARY, (2, 9))
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(d_kv=16, d_ff=128, num_layers=2, num_heads=4, **sizes)
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids}
    parts = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    if kind == "bart":
        config = transformers.BartConfig(**parts, **sizes, max_position_embeddings=64)
        return transformers.BartForConditionalGeneration(config), {"input_ids": ids}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(
        **parts, **sizes, **ends, num_mel_bins=8, max_source_positions=30, max_target_positions=64,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = {"input_features": torch.randn(2, 8, 60)}
    return transformers.WhisperForConditionalGeneration(config), features


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_encoders_with_decoders_run_as_before(kind: str) -> None:
    model, given = _encoder_decoder(kind)
    model = model.eval()
    start = torch.randint(3, VOCABULARY, (2, 5))
    fast = llm.optimize(model, dtype=torch.float32)
    report = oxytorch.explain(fast)
    assert report.fused == 0 and "is an encoder and a decoder" in str(report)
    with torch.no_grad():
        found = fast(**given, decoder_input_ids=start).logits
        expected = model(**given, decoder_input_ids=start).logits
    assert distance(found, expected) < 1e-5
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(fast.generate(**given, **options), model.generate(**given, **options))
    eight = llm.optimize(model, weights="int8")
    with torch.no_grad():
        rounded = eight(**{k: v.to(torch.bfloat16) if v.is_floating_point() else v
                           for k, v in given.items()}, decoder_input_ids=start).logits  # fmt: skip
    assert distance(rounded.float(), expected) < 0.1
    with pytest.raises(TypeError, match="expected a model that only decodes"):
        llm.generate(fast, torch.full((1, 4), 5), max_new_tokens=1)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_text_and_images_of_qwen_vl(kind: str) -> None:
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    if kind == "Qwen2_5_VL":
        vision |= {"out_hidden_size": 64, "intermediate_size": 64, "hidden_size": 32}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=198, video_token_id=197,
        vision_start_token_id=196, vision_end_token_id=195,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    ids = torch.randint(3, 190, (2, 14))
    expected = tokens(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    fast = llm.optimize(model, dtype=torch.float32)
    assert oxytorch.explain(fast).fused == 2
    with torch.no_grad():
        assert distance(fast(ids).logits, model(ids).logits) < 1e-5
    for one in (model, fast):
        assert torch.equal(llm.generate(one, ids, max_new_tokens=10)[:, 14:], expected)
    image = ids[:1].clone()
    image[0, 3:9] = torch.tensor([196, 198, 198, 198, 198, 195])
    given = {
        "input_ids": image,
        "attention_mask": torch.ones_like(image),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (image == 198).long(),
    }
    assert torch.equal(tokens(fast, given), tokens(model, given))


@pytest.mark.parametrize(
    "kind", ["t5", "bart", "whisper", "marian", "deepseek_v3", "gptj", "llama"]
)
def test_buffers_and_scores_have_the_dtypes_that_transformers_gives(
    kind: str, tmp_path: Path
) -> None:
    model, given = _of_any_kind(kind)
    model = model.eval()
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    fast = llm.optimize(model)
    dtypes = {name: buffer.dtype for name, buffer in stock.named_buffers()}
    saved = {name for name in dtypes if name in stock.state_dict()}
    found = {name: buffer.dtype for name, buffer in fast.named_buffers()}
    assert {name: found[name] for name in saved} == {name: dtypes[name] for name in saved}
    given = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in given.items()
    }
    with torch.no_grad():
        logits, expected = fast(**given).logits, stock(**given).logits
    assert logits.dtype == expected.dtype == torch.bfloat16
    oxytorch.undo(fast)
    before = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert {name: buffer.dtype for name, buffer in fast.named_buffers()} == before


@pytest.mark.parametrize("activation", ["relu", "tanh", "relu2"])
def test_a_gated_activation_that_no_product_applies_is_left_and_named(activation: str) -> None:
    model = build("llama")
    config = type(model.config)(**{**model.config.to_dict(), "hidden_act": activation})
    stock = type(model)(config).eval()
    ids = prompt(2, 17)["input_ids"]
    fast = llm.optimize(stock, dtype=torch.float32)
    reasons = [entry.detail for entry in oxytorch.explain(fast).skipped]
    assert any("act_fn is none of silu, gelu, gelu_tanh" in reason for reason in reasons)
    with torch.no_grad():
        assert distance(fast(ids).logits, stock(ids).logits) < 1e-5


def _of_any_kind(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.randint(3, VOCABULARY, (2, 9))
    if kind in ("t5", "bart", "whisper"):
        model, given = _encoder_decoder(kind)
        return model, {**given, "decoder_input_ids": ids}
    torch.manual_seed(0)
    if kind == "marian":
        config = transformers.MarianConfig(
            vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=1, pad_token_id=0,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
            decoder_ffn_dim=96, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.MarianMTModel(config)
        return model, {"input_ids": ids, "decoder_input_ids": ids}
    if kind == "deepseek_v3":
        config = transformers.DeepseekV3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2,
            num_experts_per_tok=2, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, topk_group=1,
            first_k_dense_replace=1,
        )  # fmt: skip
        return transformers.DeepseekV3ForCausalLM(config), {"input_ids": ids}
    return build(kind), {"input_ids": ids}
