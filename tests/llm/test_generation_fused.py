"""`generate` over models that `llm.optimize` made: the tokens of their own `generate`."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from oxytorch import llm
from oxytorch.llm.decoder import FusedDecoder, PlainDecoder, decoder_of
from oxytorch.llm.single_steps import UNRECORDED

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
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 10}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 10, "final_logit_softcapping": 20.0},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
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


def test_padding_means_the_same_to_an_int8_cache():
    model = llm.optimize(_model("llama"), kv_cache="int8")
    for _ in range(8):
        ids, mask = _prompts()
        found = llm.generate(model, ids, attention_mask=mask, max_new_tokens=20)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        assert torch.equal(found, expected)


def _steps_through_python(model, monkeypatch) -> list[int]:
    """The lengths of the steps that are not recorded, as they come."""
    lengths: list[int] = []
    step = type(llm.fused_model(model)).step

    def counted(self, tokens, cache, **options):
        lengths.append(tokens.shape[1])
        return step(self, tokens, cache, **options)

    monkeypatch.setattr(type(llm.fused_model(model)), "step", counted)
    return lengths


def test_single_steps_are_recorded_once_for_all_runs_of_a_form(monkeypatch):
    model = llm.optimize(_model("llama"), dtype=torch.float32)
    lengths = _steps_through_python(model, monkeypatch)
    ids, mask = _prompts()
    first = llm.generate(model, ids[1:], max_new_tokens=30, eos_token_id=[])
    assert lengths == [14] + [1] * UNRECORDED
    lengths.clear()
    again = llm.generate(model, ids[1:], max_new_tokens=30, eos_token_id=[], capacity=120)
    assert lengths == [14] and torch.equal(first, again)
    lengths.clear()
    options = {"max_new_tokens": 20, "attention_mask": mask}
    padded = llm.generate(model, ids, eos_token_id=[], **options)
    assert lengths == [14] and torch.equal(padded[1, :34], first[0, :34])
    stock = model.generate(ids, do_sample=False, eos_token_id=None, **options)
    assert torch.equal(padded, stock)


def test_recorded_steps_see_new_weights(monkeypatch):
    model = llm.optimize(_model("llama"))
    ids, _ = _prompts()
    options = {"max_new_tokens": 20}
    before = llm.generate(model, ids, eos_token_id=[], **options)
    changes = [
        lambda: model.model.norm.weight.mul_(torch.linspace(-1, 1, 64)),
        lambda: model.load_state_dict(_model("llama").to(torch.bfloat16).state_dict()),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        after = llm.generate(model, ids, eos_token_id=[], **options)
        assert not torch.equal(after, before)
        expected = model.generate(ids, do_sample=False, eos_token_id=None, **options)
        assert torch.equal(after, expected)
        before = after


def test_recorded_steps_are_seen_by_a_profiler():
    model = llm.optimize(_model("llama"), dtype=torch.float32)
    ids, _ = _prompts()
    options = {"max_new_tokens": 20, "eos_token_id": []}
    expected = llm.generate(model, ids[1:], **options)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert torch.equal(llm.generate(model, ids[1:], **options), expected)
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["oxytorch::cached_attention"] == 20 * model.config.num_hidden_layers
    assert counts["oxytorch::run_program"] == 19


def test_capacity_changes_no_token():
    model = llm.optimize(_model("llama"), dtype=torch.float32, kv_cache="int8")
    ids, _ = _prompts()
    short = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    long = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[], capacity=200)
    assert torch.equal(short, long)
    with pytest.raises(ValueError, match="14 tokens and 8 new ones do not fit capacity 20"):
        llm.generate(model, ids, max_new_tokens=8, capacity=20)


def test_memory_of_the_cache_is_foreseen(monkeypatch):
    config = transformers.LlamaConfig(**{**COMMON, "max_position_embeddings": 1 << 40})
    model = llm.optimize(transformers.LlamaForCausalLM(config).eval())
    ids, _ = _prompts()
    with pytest.raises(MemoryError, match="GiB of free memory for the keys and values of 2 x"):
        llm.generate(model, ids, max_new_tokens=8, capacity=1 << 38)


def test_models_after_undo_run_their_own_code():
    import oxytorch

    model = llm.optimize(_model("llama"), dtype=torch.float32)
    ids, _ = _prompts()
    found = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    oxytorch.undo(model)
    assert isinstance(decoder_of(model), PlainDecoder)
    assert torch.equal(llm.generate(model, ids, max_new_tokens=8, eos_token_id=[]), found)
