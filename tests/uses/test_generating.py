"""What the documentation of transformers does with `generate`: equal tokens, and what it returns.

Tokens of float32 models have to be stock's, those of int8 models a plain model's that has the
rounded values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiny import tiny

from .compare import Log
from .registers import into_of
from .transformers_models import gpt2, llama, spread, t5, token_ids

transformers = pytest.importorskip("transformers")

FORMS = ("default", "sample", "program", "llm", "llm_int8", "int8")
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
Use = Callable[[Any, Log], None]
USES: dict[str, tuple[str, Use]] = {}
use = into_of(USES)
"""Registers a use of `generate`, for models of these names."""


def mistral() -> Any:
    return tiny(
        "MistralForCausalLM", vocab_size=99, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, sliding_window=6,
        max_position_embeddings=64, eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def bart() -> Any:
    return tiny(
        "BartForConditionalGeneration", vocab_size=99, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=2, eos_token_id=1,
        pad_token_id=0, bos_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip


MODELS = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "t5": t5, "bart": bart}
DECODERS = ("llama", "gpt2", "mistral")
ENCODED = ("t5", "bart")


def _padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :3] = 0
    mask[2, :7] = 0
    return {"input_ids": token_ids(3, 9), "attention_mask": mask}


@use(*MODELS)
def _greedy(model: Any, log: Log) -> None:
    ids = token_ids(1, 6)
    log(model.generate(ids, do_sample=False, **LENGTH))
    log(model.generate(ids, do_sample=False, use_cache=False, **LENGTH))
    log(model.generate(inputs=ids, generation_config=transformers.GenerationConfig(**LENGTH)))
    log(model.generate(ids, do_sample=False, max_length=12, min_length=3))
    log(model.generate(token_ids(2, 6), do_sample=False, **LENGTH))


@use(*MODELS)
def _padded_batches(model: Any, log: Log) -> None:
    log(model.generate(**_padded(), do_sample=False, **LENGTH))
    one = {name: value[:1] for name, value in _padded().items()}
    log(model.generate(**one, do_sample=False, **LENGTH))
    log(model.generate(**_padded(), do_sample=False, num_beams=2, **LENGTH))


@use(*MODELS)
def _sampled(model: Any, log: Log) -> None:
    ids = token_ids(2, 6)
    for settings in (
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.01},
        {"typical_p": 0.7},
        {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
        {"num_return_sequences": 2},
        {"num_beams": 2},
    ):
        transformers.set_seed(11)
        log(model.generate(ids, do_sample=True, **{**LENGTH, **settings}))


def _each(model: Any, log: Log, *given: dict[str, Any]) -> None:
    """The most likely tokens under some settings, one after the other."""
    ids = token_ids(2, 6)
    for settings in given:
        log(model.generate(ids, do_sample=False, **{**LENGTH, **settings}))


@use(*MODELS)
def _beams(model: Any, log: Log) -> None:
    _each(
        model,
        log,
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"num_beams": 2, "early_stopping": True, "min_new_tokens": 1},
        {"num_beams": 2, "no_repeat_ngram_size": 2},
    )


@use(*MODELS)
def _processors(model: Any, log: Log) -> None:
    class Odd(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, ::2] = -float("inf")
            return scores

    _each(
        model,
        log,
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 8]]},
        {"suppress_tokens": [5, 6, 7]},
        {"begin_suppress_tokens": [5]},
        {"sequence_bias": {(9,): 3.0}},
        {"forced_eos_token_id": 1},
        {"exponential_decay_length_penalty": (2, 1.5), "min_new_tokens": 1},
        {"renormalize_logits": True},
        {"remove_invalid_values": True},
        {"logits_processor": transformers.LogitsProcessorList([Odd()])},
        {"prefix_allowed_tokens_fn": lambda batch, sent: [3, 4, 5, 6 + batch]},
    )


@use(*DECODERS)
def _guided(model: Any, log: Log) -> None:
    ids = token_ids(1, 6)
    log(model.generate(ids, do_sample=False, guidance_scale=1.5, **LENGTH))
    other = token_ids(1, 6) + 1
    log(model.generate(
        ids, do_sample=False, guidance_scale=1.5, negative_prompt_ids=other, **LENGTH
    ))  # fmt: skip
    marks = transformers.WatermarkingConfig(bias=2.0, seeding_scheme="selfhash")
    log(model.generate(ids, do_sample=False, watermarking_config=marks, **LENGTH))


@use(*MODELS)
def _stopped(model: Any, log: Log) -> None:
    ids = token_ids(1, 6)
    seen: list[int] = []

    class After(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(input_ids.shape[1])
            return torch.full((input_ids.shape[0],), len(seen) >= 3)

    criteria = transformers.StoppingCriteriaList([After()])
    log(model.generate(ids, do_sample=False, stopping_criteria=criteria, max_new_tokens=8), seen)
    free = model.generate(ids, do_sample=False, **LENGTH)
    end = int(free[0, -3])
    log(model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=[end, 1]))
    log(model.generate(token_ids(2, 6), do_sample=False, max_new_tokens=8, eos_token_id=end))
    log(model.generate(ids, do_sample=False, max_new_tokens=4, max_time=100.0))


@use(*MODELS)
def _streamed(model: Any, log: Log) -> None:
    sent: list[Any] = []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            sent.append(value.clone())

        def end(self) -> None:
            sent.append("end")

    log(model.generate(token_ids(1, 6), do_sample=False, streamer=Streamer(), **LENGTH), sent)


@use(*MODELS)
def _everything_returned(model: Any, log: Log) -> None:
    model.set_attn_implementation("eager")
    for settings in ({}, {"num_beams": 2}):
        out = model.generate(
            token_ids(2, 6), do_sample=False, return_dict_in_generate=True, output_scores=True,
            output_logits=True, output_attentions=True, output_hidden_states=True,
            **{**LENGTH, **settings},
        )  # fmt: skip
        log(type(out).__name__, sorted(out.keys()), out.sequences, [*out.scores], [*out.logits])
        for name in ("attentions", "hidden_states", "decoder_attentions", "encoder_hidden_states"):
            found = out.get(name)
            log(None if found is None else [s for step in found for s in step])
        scores = model.compute_transition_scores(
            out.sequences, out.scores, out.get("beam_indices"), normalize_logits=True
        )
        log(scores, out.past_key_values.get_seq_length())


@use(*DECODERS)
def _cache_over_turns(model: Any, log: Log) -> None:
    """A conversation: each turn goes on from the cache of the last."""
    cache = transformers.DynamicCache(config=model.config)
    ids = token_ids(1, 5)
    for turn in range(3):
        ids = model.generate(
            ids,
            past_key_values=cache,
            do_sample=False,
            **{**LENGTH, "max_new_tokens": 4, "min_new_tokens": 4},
        )
        log(ids, cache.get_seq_length(), [layer.keys for layer in cache.layers])
        ids = torch.cat([ids, token_ids(1, 3) + turn], -1)
    whole = model.generate(ids, do_sample=False, **LENGTH)
    log(whole, model.generate(ids, past_key_values=cache, do_sample=False, **LENGTH))


@use("llama", "gpt2")
def _cache_cropped_and_copied(model: Any, log: Log) -> None:
    """A prompt is read once and goes on in several ways."""
    prompt = token_ids(1, 6)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        log(model(prompt, past_key_values=cache, use_cache=True).logits)
    for more in (1, 2):
        ids = torch.cat([prompt, token_ids(1, 3) + more], -1)
        log(model.generate(ids, past_key_values=copy.deepcopy(cache), do_sample=False, **LENGTH))
    out = model.generate(
        prompt, past_key_values=cache, do_sample=False, return_dict_in_generate=True, **LENGTH
    )
    cache = out.past_key_values
    cache.crop(8 - cache.get_seq_length())
    log(out.sequences, cache.get_seq_length())
    ids = torch.cat([out.sequences[:, :8], token_ids(1, 2)], -1)
    log(model.generate(ids, past_key_values=cache, do_sample=False, **LENGTH))
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        log(model(token_ids(2, 1), past_key_values=cache).logits)
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        log(model(token_ids(1, 1), past_key_values=cache).logits)
    cache.reset()


@use(*DECODERS)
def _kinds_of_caches(model: Any, log: Log) -> None:
    ids = token_ids(2, 6)
    for kind in ("dynamic", "static", "offloaded", "offloaded_static", "quantized"):
        try:
            log(model.generate(ids, do_sample=False, cache_implementation=kind, **LENGTH))
        except Exception as error:  # a device or package that the kind needs
            log(kind, type(error).__name__)
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    log(model.generate(ids, do_sample=False, past_key_values=static, **LENGTH))
    log(static.get_seq_length())
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        out = model(ids, past_key_values=static)
        log(out.logits)
        log(model(out.logits[:, -1:].argmax(-1), past_key_values=static).logits)


@use(*DECODERS)
def _prefilled_in_chunks(model: Any, log: Log) -> None:
    ids = token_ids(2, 11)
    log(model.generate(ids, do_sample=False, prefill_chunk_size=4, **LENGTH))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for begin in range(0, 11, 4):
            out = model(ids[:, begin : begin + 4], past_key_values=cache, use_cache=True)
            log(out.logits)
        for _ in range(3):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
            log(out.logits)
    log(model.generate(ids, do_sample=False, logits_to_keep=1, **LENGTH))


@use(*DECODERS)
def _embeddings_given(model: Any, log: Log) -> None:
    embeds = model.get_input_embeddings()(token_ids(2, 6)).detach()
    log(model.generate(inputs_embeds=embeds, do_sample=False, **LENGTH))
    log(model.generate(token_ids(2, 6), inputs_embeds=embeds * 0.5, do_sample=False, **LENGTH))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    log(model.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, **LENGTH))


@use("llama", "gpt2")
def _assisted(model: Any, log: Log) -> None:
    torch.manual_seed(21)
    helper = MODELS[model.config.model_type]()
    ids = token_ids(1, 8)
    log(model.generate(ids, do_sample=False, assistant_model=helper, **LENGTH))
    log(model.generate(ids, do_sample=False, assistant_model=copy.deepcopy(model), **LENGTH))
    log(helper.generate(ids, do_sample=False, assistant_model=model, **LENGTH))
    repeated = torch.cat([ids, ids], -1)
    log(model.generate(repeated, do_sample=False, prompt_lookup_num_tokens=3, **LENGTH))
    transformers.set_seed(5)
    log(model.generate(ids, do_sample=True, assistant_model=helper, **LENGTH))


@use(*ENCODED)
def _encoder_outputs_given(model: Any, log: Log) -> None:
    ids = token_ids(2, 6)
    with torch.no_grad():
        encoded = model.get_encoder()(ids)
    log(encoded.last_hidden_state)
    for settings in ({}, {"num_beams": 2}):
        given = copy.copy(encoded)  # which generate repeats for beams
        log(model.generate(encoder_outputs=given, do_sample=False, **LENGTH, **settings))
    start = torch.tensor([[2, 9, 8], [2, 7, 6]])
    log(model.generate(ids, decoder_input_ids=start, do_sample=False, **LENGTH))
    cache = None
    with torch.no_grad():
        for _ in range(3):
            new = start if cache is None else start[:, -1:]
            out = model(
                encoder_outputs=encoded, decoder_input_ids=new, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache = out.past_key_values
            start = torch.cat([start, out.logits[:, -1:].argmax(-1)], -1)
            log(out.logits)


@use("t5", "bart")
def _caches_of_encoded(model: Any, log: Log) -> None:
    ids = token_ids(2, 6)
    log(model.generate(ids, do_sample=False, cache_implementation="static", **LENGTH))
    kind = transformers.EncoderDecoderCache
    cache = kind(
        transformers.DynamicCache(config=model.config),
        transformers.DynamicCache(config=model.config),
    )
    log(model.generate(ids, past_key_values=cache, do_sample=False, **LENGTH))


@use(*DECODERS)
def _continued_by_hand(model: Any, log: Log) -> None:
    """Greedy search over positions and masks that are given, padded on the left."""
    given = _padded()
    ids, mask = given["input_ids"], given["attention_mask"]
    cache = None
    with torch.no_grad():
        for step in range(5):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            new = ids if cache is None else ids[:, -1:]
            out = model(
                new, attention_mask=mask, position_ids=positions[:, -new.shape[1] :],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache = out.past_key_values
            log(out.logits[:, -1])
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], -1)
            mask = torch.cat([mask, mask.new_ones(3, 1)], -1)
            if step == 2:
                legacy = [(layer.keys, layer.values) for layer in cache.layers]
                log([pair[0] for pair in legacy])
    log(ids)


@use("llama", "gpt2")
def _forward_compiled(model: Any, log: Log) -> None:
    torch._dynamo.reset()
    own = model.forward
    model.forward = torch.compile(model.forward, backend="eager")
    log(model.generate(token_ids(1, 6), do_sample=False, **LENGTH))
    model.forward = own
    log(model.generate(token_ids(1, 6), do_sample=False, **LENGTH))
    torch._dynamo.reset()


@use(*DECODERS)
def _settings_of_the_model(model: Any, log: Log) -> None:
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.max_new_tokens = 5
    log(model.generate(token_ids(1, 6), do_sample=False))
    model.generation_config = transformers.GenerationConfig(max_new_tokens=4, pad_token_id=0)
    log(model.generate(token_ids(2, 6)))
    try:
        model.generate(token_ids(1, 6), max_new_tokens=4, unknown_setting=3)
    except ValueError as error:
        log(type(error).__name__)
    try:
        model.generate(token_ids(1, 6), max_length=3)
    except Exception as error:
        log(type(error).__name__)


@use("llama", "gpt2")
def _weights_changed_between(model: Any, log: Log) -> None:
    ids = token_ids(1, 6)
    for scale in (1.0, 2.0):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        log(model.generate(ids, do_sample=False, **LENGTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log(model.generate(ids, do_sample=False, **LENGTH).shape)
    with torch.inference_mode():
        log(model.generate(ids, do_sample=False, **LENGTH))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "form"), spread(USES, FORMS))
def test_generate(check: Callable[..., None], name: str, form: str) -> None:
    network, function = USES[name]
    if form.startswith("llm") and network in ENCODED:
        pytest.skip("a decoder on its own only")

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            given = {"decoder_input_ids": token_ids(1, 3)} if network in ENCODED else {}
            log(model(token_ids(1, 5), **given).logits)
        function(model, log)

    def sample() -> dict[str, torch.Tensor]:
        more = {"decoder_input_ids": token_ids(1, 3)} if network in ENCODED else {}
        return {"input_ids": token_ids(1, 5), **more}

    check(MODELS[network], use, form, sample, tolerance=3e-5)
