"""What a model's generation_config says: followed as `model.generate` does, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from language_models import VOCABULARY, build

from oxytorch import llm
from tiny import tiny_llama

transformers = pytest.importorskip("transformers")

END = 57
MANY = [*range(2, 50)]


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """A model as it is, and optimized."""
    model = build("llama")
    return [model, llm.optimize(model, dtype=torch.float32)]


@pytest.fixture
def configured(models: list[Any], request: pytest.FixtureRequest) -> list[Any]:
    """The models, whose settings may be changed."""
    for model in models:
        before = model.generation_config
        model.generation_config = copy.deepcopy(before)
        request.addfinalizer(lambda m=model, b=before: setattr(m, "generation_config", b))
    return models


def _set(models: list[Any], settings: dict[str, Any]) -> None:
    for model in models:
        for name, value in settings.items():
            setattr(model.generation_config, name, value)


def _prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": MANY},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*MANY, *range(60, 150)]},
    "bad_words_ids": {"bad_words_ids": [[token] for token in MANY]},
    "sequence_bias": {"sequence_bias": [[[token], 9.0] for token in MANY]},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "eos_token_id": {"eos_token_id": [*range(20, 60)]},
    "min_new_tokens": {"eos_token_id": [*range(20, 60)], "min_new_tokens": 9},
    "min_length": {"eos_token_id": [*range(20, 60)], "min_length": 20},
    "exponential_decay": {
        "eos_token_id": END,
        "exponential_decay_length_penalty": (2, 1.8),
    },
    "watermarking": {"watermarking_config": transformers.WatermarkingConfig(bias=9.0)},
    "guidance_scale": {"guidance_scale": 2.5},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "sequence_bias": [[[token], 4.0] for token in MANY],
        "suppress_tokens": [*range(100, 140)],
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_followed(name: str, configured: list[Any]) -> None:
    given = _prompts()
    options = {"max_new_tokens": 25}
    usual = [model.generate(**given, do_sample=False, **options) for model in configured]
    _set(configured, SETTINGS[name])
    for model, before in zip(configured, usual, strict=True):
        expected = model.generate(**given, do_sample=False, **options)
        assert expected.shape != before.shape or not torch.equal(expected, before)
        found = llm.generate(model, **given, **options)
        assert torch.equal(found, expected)
        columns = [*llm.stream(model, **given, **options)]
        assert torch.equal(torch.stack(columns, 1), expected[:, 9:])


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_followed_beside_ones_that_nobody_set(
    name: str, configured: list[Any]
) -> None:
    """transformers 5 leaves them None and fills them at each call."""
    given = _prompts()
    for model in configured:
        model.generation_config = transformers.GenerationConfig(pad_token_id=0, **SETTINGS[name])
        expected = model.generate(**given, max_new_tokens=25, do_sample=False)
        assert torch.equal(llm.generate(model, **given, max_new_tokens=25), expected)


def test_a_forced_first_token_follows_a_single_one(configured: list[Any]) -> None:
    ids = torch.tensor([[9]])
    _set(configured, {"forced_bos_token_id": 5})
    for model in configured:
        found = llm.generate(model, ids, max_new_tokens=8)
        assert found[0, 1] == 5
        assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"])
def test_settings_are_followed_with_prompt_lookup(name: str, configured: list[Any]) -> None:
    ids = torch.randint(3, VOCABULARY, (1, 6)).repeat(1, 4)
    _set(configured, SETTINGS[name])
    for model in configured:
        expected = model.generate(ids, max_new_tokens=40, do_sample=False)
        found = llm.generate(model, ids, max_new_tokens=40, prompt_lookup=5)
        assert torch.equal(found, expected)


def test_an_argument_goes_before_the_setting(configured: list[Any]) -> None:
    given = _prompts()
    usual = configured[0].generate(**given, do_sample=False, max_new_tokens=25)
    _set(configured, {"repetition_penalty": 1.6, "eos_token_id": [*range(20, 60)]})
    for model in configured:
        found = llm.generate(
            model, **given, max_new_tokens=25, repetition_penalty=1.0, eos_token_id=[]
        )
        assert torch.equal(found, usual)


def test_settings_for_sampling_are_not_looked_at(configured: list[Any]) -> None:
    given = _prompts()
    usual = llm.generate(configured[1], **given, max_new_tokens=12)
    _set(configured, {"do_sample": True, "temperature": 3.0, "top_k": 5, "top_p": 0.5})
    assert torch.equal(llm.generate(configured[1], **given, max_new_tokens=12), usual)


def test_an_end_token_that_was_taken_away_does_not_end(configured: list[Any]) -> None:
    given = _prompts()
    for model in configured:
        before = model.config.eos_token_id
        free = model.generate(**given, max_new_tokens=20, do_sample=False)
        model.config.eos_token_id = int(free[1, 12])
        try:
            assert torch.equal(llm.generate(model, **given, max_new_tokens=20), free)
        finally:
            model.config.eos_token_id = before


def test_a_model_without_a_generation_config_runs() -> None:
    model: Any = build("llama")
    given = _prompts()
    expected = model.generate(**given, max_new_tokens=12, do_sample=False)
    model.generation_config = None
    assert torch.equal(llm.generate(model, **given, max_new_tokens=12), expected)


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("A") + int(token)) for token in tokens)


def test_stop_strings_need_the_tokenizer_and_stop(configured: list[Any]) -> None:
    ids = _prompts()["input_ids"][1:2]
    free = llm.generate(configured[1], ids, max_new_tokens=20)[0, 9:].tolist()
    _set(configured, {"stop_strings": Letters().decode(free[4:7])})
    with pytest.raises(ValueError, match=r"stop '.*' is text: give the model's tokenizer"):
        llm.generate(configured[1], ids, max_new_tokens=20)
    found = llm.generate(configured[1], ids, max_new_tokens=20, tokenizer=Letters())[0, 9:]
    end = next(i for i in range(20) if free[i : i + 3] == free[4:7]) + 3
    assert found.tolist() == free[:end]


REFUSED = {
    "num_beams": (3, "1"),
    "num_return_sequences": (2, "1"),
    "penalty_alpha": (0.6, "0.0"),
    "dola_layers": ("high", "None"),
    "force_words_ids": ([[5]], "None"),
    "token_healing": (True, "False"),
    "max_time": (0.5, "None"),
    "cache_implementation": ("quantized", "None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_searches_are_refused_with_the_remedy(name: str, configured: list[Any]) -> None:
    value, idle = REFUSED[name]
    _set(configured, {name: value})
    message = f"expected {name} {idle} .*use model.generate, or set model.generation_config.{name} "
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=message):
            call(configured[1], _prompts()["input_ids"], max_new_tokens=3)


def test_the_padding_token_stands_for_padding_without_a_mask(configured: list[Any]) -> None:
    given = _prompts()
    for model in configured:
        expected = model.generate(given["input_ids"], max_new_tokens=12, do_sample=False)
        assert torch.equal(expected, model.generate(**given, max_new_tokens=12, do_sample=False))
        assert torch.equal(llm.generate(model, given["input_ids"], max_new_tokens=12), expected)
    inside = given["input_ids"][1:].clone()
    inside[0, 3] = 0
    with pytest.raises(ValueError, match=r"attention_mask=torch.ones_like\(input_ids\)"):
        llm.generate(configured[0], inside, max_new_tokens=3)
    _set(configured, {"eos_token_id": 0})
    for model in configured:
        expected = model.generate(given["input_ids"], max_new_tokens=12, do_sample=False)
        assert torch.equal(llm.generate(model, given["input_ids"], max_new_tokens=12), expected)


SCALED = {
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5] * 8,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_angles_for_longer_texts_go_beyond_the_positions(kind: str) -> None:
    torch.manual_seed(0)
    model = tiny_llama(
        vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=64,
        rope_scaling={"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]},
        initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    fast = llm.optimize(model, dtype=torch.float32)
    for length in (50, 90):
        ids = torch.randint(3, VOCABULARY, (1, length))
        # The angles of some kinds depend on what the module saw before.
        found = llm.generate(fast, ids, max_new_tokens=20)
        expected = model.generate(ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(found, expected)
