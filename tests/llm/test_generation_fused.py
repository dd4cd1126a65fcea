"""`generate` over models that `llm.optimize` made: the tokens of their own `generate`."""

from __future__ import annotations

import pytest
import torch

from oxytorch import llm
from oxytorch.llm.decoder import FusedDecoder, PlainDecoder, decoder_of

transformers = pytest.importorskip("transformers")

VOCABULARY = 160
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 10}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def _model(family: str):
    name, settings = CONFIGS[family]
    torch.manual_seed(5)
    config = getattr(transformers, name)(**{**COMMON, **settings})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _prompts():
    """Two prompts, the first padded on the left."""
    ids = torch.randint(3, VOCABULARY, (2, 14))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@pytest.mark.parametrize("family", CONFIGS)
def test_fused_tokens_equal_those_of_the_optimized_model(family):
    model = llm.optimize(_model(family), dtype=torch.float32)
    assert isinstance(decoder_of(model), FusedDecoder)
    ids, mask = _prompts()
    options = {"max_new_tokens": 24}
    found = llm.generate(model, ids[1:], eos_token_id=[], **options)
    expected = model.generate(ids[1:], do_sample=False, eos_token_id=None, **options)
    assert torch.equal(found, expected)
    assert len(set(found[0, 14:].tolist())) > 3
    found = llm.generate(model, ids, attention_mask=mask, eos_token_id=[], **options)
    expected = model.generate(
        ids, attention_mask=mask, do_sample=False, eos_token_id=None, **options
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_fused_tokens_equal_in_bfloat16_and_with_prompt_lookup(weights):
    model = llm.optimize(_model("llama"), weights=weights, group_size=64)
    ids = torch.randint(3, VOCABULARY, (1, 7)).repeat(1, 3)
    found = llm.generate(model, ids, max_new_tokens=40, eos_token_id=[])
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert torch.equal(found, expected)
    for guesses in (2, 6):
        guessed = llm.generate(
            model, ids, max_new_tokens=40, eos_token_id=[], prompt_lookup=guesses
        )
        assert torch.equal(guessed, found)


def test_capacity_and_steps_of_the_cache(monkeypatch):
    model = llm.optimize(_model("llama"), dtype=torch.float32, kv_cache="int8")
    ids, _ = _prompts()
    short = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    long = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[], capacity=200)
    assert torch.equal(short, long)
    with pytest.raises(ValueError, match="14 tokens and 8 new ones do not fit capacity 20"):
        llm.generate(model, ids, max_new_tokens=8, capacity=20)


def test_models_after_undo_run_their_own_code():
    import oxytorch

    model = llm.optimize(_model("llama"), dtype=torch.float32)
    ids, _ = _prompts()
    found = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    oxytorch.undo(model)
    assert isinstance(decoder_of(model), PlainDecoder)
    assert torch.equal(llm.generate(model, ids, max_new_tokens=8, eos_token_id=[]), found)
