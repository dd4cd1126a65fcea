"""The generation loop: prefill, then choose a token and decode, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .configured import Processor, check_search, processor_of, setting
from .decoder import Decoder, decoder_of
from .language_model import LanguageModel
from .lookup import PromptLookup
from .numbers import whole
from .sampling import Sampler
from .stopping import Stop, Stopping

MOST_GUESSES = 7
"""Guesses of one step: up to 8 tokens every row has the sums that it would have alone."""

Streamer = Callable[[Tensor], object]
"""Is called with the new tokens [batch] int64 as soon as they are chosen."""


def generate(
    model: nn.Module | LanguageModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Stop = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    streamer: Streamer | Any = None,
    prompt_lookup: int = 0,
    capacity: int | None = None,
) -> Tensor:
    """Return the prompts followed by the tokens that the model generates.

    model: a causal language model of transformers. One from `oxytorch.llm.optimize` runs without
        its Python code, as one that `oxytorch.load` returned does.
    input_ids: the prompts, int64 [batch, length].
    max_new_tokens: the most tokens to generate.
    attention_mask: [batch, length], 0 or False for padding, which is on one side of each prompt.
        None: the model's padding token is padding, unless it is an end token too.
    temperature: 0 takes the most likely token, as `model.generate(do_sample=False)` does. Otherwise
        logits are divided by it and tokens sampled.
    top_k: sample among the k most likely tokens. None: all.
    top_p: sample among the most likely tokens up to this probability, after top_k. None: all.
    repetition_penalty: scores of tokens that have occurred are divided by it if positive and
        multiplied if negative (Keskar et al., CTRL, 2019, section 4.1). None: that of the
        model's generation_config.
    seed: makes sampling reproducible. None draws from torch's generator.
    stop: a string, or strings and sequences of token ids, that end a sequence, in addition to the
        generation_config's stop_strings. Strings need `tokenizer`.
    eos_token_id: tokens that end a sequence. None: those of the generation_config; an empty list:
        none.
    pad_token_id: fills finished sequences while others continue. None: that of the
        generation_config, else the first end token, else 0.
    tokenizer: the model's tokenizer, for strings in `stop`.
    streamer: a function of the new tokens [batch], or a streamer of transformers.
    prompt_lookup: at most 7: guess so many tokens from earlier text and check them in one step.
        For one sequence at temperature 0, whose tokens stay the same (with an int8 cache up to the
        rounding of scores, which differs between one token and several).
    capacity: positions of the cache. None: as many as prompt and new tokens need.

    Other settings of the generation_config for scores and lengths apply as in `model.generate`
    (see `configured.processor_of`). Its settings for sampling do not.

    Returns int64 [batch, length + new], with at most max_new_tokens new columns.

    Raises ValueError before the model runs if an argument does not fit or the generation_config
    asks for another search (beams, for example), TypeError for a model of another kind, and
    RuntimeError if the logits are not finite.
    """
    put = _put_of(streamer)
    tokens = _started(
        model,
        input_ids,
        put is not None,
        max_new_tokens=max_new_tokens,
        attention_mask=attention_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        tokenizer=tokenizer,
        prompt_lookup=prompt_lookup,
        capacity=capacity,
    )
    if put is not streamer:
        put(input_ids)  # streamers of transformers see the prompt first
    new = []
    for column in tokens:
        new.append(column)
        if put is not None:
            put(column)
    if hasattr(streamer, "end"):
        streamer.end()
    return torch.cat([input_ids, torch.stack(new, 1)], 1)


def _put_of(streamer: Any) -> Any:
    """What new tokens are given to, None where there is nobody."""
    put = getattr(streamer, "put", streamer)
    if put is not None and not callable(put):
        raise ValueError(
            "generate: expected streamer to be a function of the new tokens or to have put() and "
            f"end(), got a {type(streamer).__name__}"
        )
    return put


def stream(
    model: nn.Module | LanguageModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Stop = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    prompt_lookup: int = 0,
    capacity: int | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens of `generate`, int64 [batch], one position at a time.

    Parameters and errors are those of `generate`. Arguments are checked before this returns. The
    model runs when the first token is requested.
    """
    return _started(
        model,
        input_ids,
        True,
        max_new_tokens=max_new_tokens,
        attention_mask=attention_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        tokenizer=tokenizer,
        prompt_lookup=prompt_lookup,
        capacity=capacity,
    )


def _started(
    model: nn.Module | LanguageModel,
    input_ids: Tensor,
    is_watched: bool,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
    stop: Stop,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    tokenizer: Any,
    prompt_lookup: int,
    capacity: int | None,
) -> Iterator[Tensor]:
    """What `stream` returns; is_watched: others run between two tokens."""
    max_new_tokens = whole("generate", "max_new_tokens", max_new_tokens, 1)
    decoder = decoder_of(model)
    check_search(model)
    sampler = Sampler(temperature, top_k, top_p, seed)
    ends = end_tokens(model, eos_token_id)
    pad = setting(model, "pad_token_id") if pad_token_id is None else pad_token_id
    if pad is not None:
        pad = whole("generate", "pad_token_id", pad, -(2**63), 2**63 - 1)
    inferred = None if pad in ends else pad
    prompt = _checked_prompt(input_ids, attention_mask, decoder.vocabulary, inferred)
    batch, length = prompt.tokens.shape
    capacity = _checked_capacity(length, max_new_tokens, capacity, decoder.positions)
    _check_lookup(prompt_lookup, batch, temperature)
    if prompt_lookup and not decoder.keeps_keys:
        raise ValueError(
            "generate: prompt_lookup needs a model that can forget tokens again, and a "
            f"{type(model).__name__} keeps a running state; use prompt_lookup=0"
        )
    processor = processor_of(
        model, prompt.tokens, prompt.mask(), max_new_tokens, ends, repetition_penalty
    )
    if pad is None:
        pad = ends[0] if ends else 0
    stopping = Stopping(ends, _stops(model, stop), tokenizer, batch)
    loop = _Loop(decoder, prompt, sampler, processor, stopping, max_new_tokens, pad, is_watched)
    return loop.tokens(capacity, prompt_lookup)


@dataclass
class _Prompt:
    """tokens: int64 [batch, length], padding first.
    padding: int64 [batch], or None for none.
    """

    tokens: Tensor
    padding: Tensor | None

    def mask(self) -> Tensor | None:
        """int64 [batch, length], 0 where padding is; None where there is none."""
        if self.padding is None:
            return None
        return (torch.arange(self.tokens.shape[1], device="cpu") >= self.padding[:, None]).long()


@dataclass
class _Loop:
    """The state of one generation that the steps share.

    processor: what changes scores before a token is chosen, or None.
    is_watched: others run between two tokens, and may change the model.
    """

    decoder: Decoder
    prompt: _Prompt
    sampler: Sampler
    processor: Processor | None
    stopping: Stopping
    most: int
    pad: int
    is_watched: bool
    _seen: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self.prompt.tokens

    @torch.inference_mode()
    def tokens(self, capacity: int, lookup: int) -> Iterator[Tensor]:
        """The new tokens [batch]; with lookup, several of them come from one step of the model."""
        batch = len(self.prompt.tokens)
        earlier = PromptLookup(self.prompt.tokens[0].tolist()) if lookup else None
        run = self.decoder.begin(batch, capacity, self.prompt.padding)
        if self.is_watched:
            run = run.followed()
        logits = run.step(self.prompt.tokens, every=False)
        guesses: list[int] = []
        left = self.most
        while True:
            known = run.length - len(guesses)
            for place in range(len(guesses) + 1):
                chosen = self._choose(logits[:, place])
                values = chosen.tolist()
                left -= 1
                complete = self.stopping.add(values)
                yield chosen
                if complete or left == 0:
                    return
                if self.is_watched:
                    run = run.followed()
                if earlier is not None:
                    earlier.add(values[0])
                if place < len(guesses) and values[0] != guesses[place]:
                    run.cut(known + place)
                    break
            following = chosen[:, None]
            if earlier is not None:
                guesses = earlier.guess(min(lookup, left - 1))
                following = torch.cat(
                    [following, torch.tensor([guesses], dtype=torch.int64, device="cpu")], 1
                )
            logits = run.step(following, every=True)

    def _choose(self, logits: Tensor) -> Tensor:
        if self.processor is not None:  # which may write to the scores
            logits = self.processor(self._seen, logits.to(torch.float32, copy=True))
        chosen = self.sampler(logits)
        if any(self.stopping.done):
            chosen = chosen.masked_fill(torch.tensor(self.stopping.done, device="cpu"), self.pad)
        if self.processor is not None:
            self._seen = torch.cat([self._seen, chosen[:, None]], 1)
        return chosen


def _checked_prompt(ids: Tensor, mask: Tensor | None, vocabulary: int, pad: int | None) -> _Prompt:
    """The prompts with their padding before them; raises ValueError where they make no sense.

    pad: the token that stands for padding where there is no mask, or None.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"generate: expected input_ids int64 [batch, length], got {shown}")
    if ids.numel() == 0:
        raise ValueError(
            f"generate: input_ids {list(ids.shape)} has no token; an empty prompt needs at least "
            "the model's start token"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            "generate: expected attention_mask to be a tensor [batch, length], "
            f"got a {type(mask).__name__}"
        )
    ids = ids.long()
    if mask is None and pad is not None:
        mask = ids != pad
    if mask is not None and bool((mask != 0).all()):
        mask = None if mask.shape == ids.shape else mask
    padding = None
    if mask is not None:
        ids, padding = _padded_first(ids, mask)
    places = torch.arange(ids.shape[1], device="cpu")
    real = ids if padding is None else ids[places >= padding[:, None]]
    wrong = (real < 0) | (real >= vocabulary)
    if bool(wrong.any()):
        raise ValueError(
            f"generate: input_ids has the token {int(real[wrong][0])}, the model knows 0 to "
            f"{vocabulary - 1}; is the tokenizer that of the model?"
        )
    # Padding may be any number; the model reads it all the same.
    return _Prompt(ids.masked_fill((ids < 0) | (ids >= vocabulary), 0), padding)


def _padded_first(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """ids with each row's padding moved before its tokens, and how much there is."""
    if mask.shape != ids.shape:
        raise ValueError(
            f"generate: expected attention_mask of shape {list(ids.shape)}, got {list(mask.shape)}"
        )
    real = mask != 0
    counts = real.sum(1)
    if bool((counts == 0).any()):
        row = int((counts == 0).nonzero()[0, 0])
        raise ValueError(
            f"generate: row {row} of attention_mask has no token; a prompt is empty (without a "
            "mask the model's pad_token_id stands for padding)"
        )
    length = ids.shape[1]
    first = real.int().argmax(1)
    places = torch.arange(length, device="cpu")
    if not bool(
        (real == ((places >= first[:, None]) & (places < (first + counts)[:, None]))).all()
    ):
        raise ValueError(
            "generate: expected attention_mask with padding only before or only after each "
            "prompt, got tokens on both sides of padding; without a mask the model's pad_token_id "
            "stands for padding: give attention_mask=torch.ones_like(input_ids) if it is text"
        )
    shifted = (places - (length - counts - first)[:, None]) % length
    return ids.gather(1, shifted), length - counts


def _checked_capacity(length: int, new: int, capacity: int | None, positions: int | None) -> int:
    wanted = length + new
    if capacity is not None:
        capacity = whole("generate", "capacity", capacity, 1)
    if capacity is not None and wanted > capacity:
        raise ValueError(
            f"generate: a prompt of {length} tokens and {new} new ones do not fit capacity "
            f"{capacity}; shorten the prompt, or raise capacity to {wanted}"
        )
    if positions is not None and wanted > positions:
        raise ValueError(
            f"generate: a prompt of {length} tokens and {new} new ones are more than the "
            f"{positions} positions that the model was made for; shorten the text, or use "
            "model.generate, which continues where it can (a model made for longer texts says so "
            "in config.max_position_embeddings or config.rope_scaling)"
        )
    return wanted if capacity is None else capacity


def _check_lookup(lookup: int, batch: int, temperature: float) -> None:
    lookup = whole("generate", "prompt_lookup", lookup, 0, MOST_GUESSES)
    if lookup and batch != 1:
        raise ValueError(f"generate: prompt_lookup takes a single sequence, got {batch}")
    if lookup and temperature:
        raise ValueError(f"generate: prompt_lookup needs temperature 0, got {temperature}")


def _stops(model: nn.Module | LanguageModel, stop: Stop) -> Stop:
    """The stops that are given, and those of the generation_config."""
    more = setting(model, "stop_strings")
    if not more:
        return stop
    given = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else [*stop]
    return [*given, *([more] if isinstance(more, str) else more)]


def end_tokens(model: nn.Module | LanguageModel, given: int | Sequence[int] | None) -> list[int]:
    found: Any = setting(model, "eos_token_id") if given is None else given
    if found is None:
        return []
    if isinstance(found, Tensor):
        found = found.tolist()
    tokens = found if isinstance(found, Iterable) and not isinstance(found, str) else [found]
    return [whole("generate", "eos_token_id", token, -1) for token in tokens]
