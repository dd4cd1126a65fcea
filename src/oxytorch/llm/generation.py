"""The loop that writes text: prompt, choose a token, one step of the model, and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import Decoder, decoder_of
from .lookup import PromptLookup
from .numbers import whole
from .sampling import Sampler
from .stopping import Stop, Stopping

MOST_GUESSES = 7
"""Guesses of one step: up to 8 tokens every row has the sums that it would have alone."""

Streamer = Callable[[Tensor], object]
"""Is called with the new tokens [batch] int64 as soon as they are chosen."""


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Stop = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    streamer: Streamer | Any = None,
    prompt_lookup: int = 0,
    capacity: int | None = None,
) -> Tensor:
    """Returns the prompts with the tokens that the model writes after them.

    model: a causal language model of `transformers`; one that `oxytorch.llm.optimize` made runs
    without its Python code.
    input_ids: int64 [batch, length]. attention_mask: [batch, length], 0 or False where padding is,
    all of it before or all of it after a prompt.
    temperature, top_k, top_p, repetition_penalty, seed: how tokens are chosen, see `Sampler`;
    temperature 0 always takes the likeliest, as `model.generate(do_sample=False)` does.
    stop: a string, or strings and sequences of token ids, after which a sequence is complete;
    strings need `tokenizer`. eos_token_id: tokens after which it is; None: those of the model's
    generation_config, an empty list: none. pad_token_id: what fills complete sequences while others
    go on; None: the model's, else its first end token, else 0.
    streamer: a function of the new tokens [batch], called as soon as they are chosen, or a
    streamer of `transformers`.
    prompt_lookup: the most tokens, up to 7, that are guessed from earlier text and checked in one
    step of the model; for a single sequence at temperature 0, where the answer stays the same (with
    an int8 cache up to the rounding of scores, which differs between one token and several).
    capacity: positions of the cache; None: as many as prompt and answer need.
    Returns int64 [batch, length + new]: at most max_new_tokens new columns, after the prompt's own.
    Raises ValueError for arguments that do not fit, before the model runs; TypeError for a model of
    another kind; RuntimeError if the logits are not finite.
    """
    watcher: Any = streamer
    put = getattr(watcher, "put", watcher)
    if put is not None and not callable(put):
        raise ValueError(
            "generate: expected streamer to be a function of the new tokens or to have put() and "
            f"end(), got a {type(streamer).__name__}"
        )
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
    if put is not watcher:
        put(input_ids)  # streamers of transformers see the prompt first
    new = []
    for column in tokens:
        new.append(column)
        if put is not None:
            put(column)
    if hasattr(watcher, "end"):
        watcher.end()
    return torch.cat([input_ids, torch.stack(new, 1)], 1)


def stream(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Stop = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    prompt_lookup: int = 0,
    capacity: int | None = None,
) -> Iterator[Tensor]:
    """The new tokens [batch] int64 of `generate`, one position after the other.

    Arguments and errors are those of `generate`; arguments are checked before this returns, the
    model runs when the first token is asked for.
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
    model: nn.Module,
    input_ids: Tensor,
    is_watched: bool,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float,
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
    sampler = Sampler(temperature, top_k, top_p, repetition_penalty, seed)
    prompt = _checked_prompt(input_ids, attention_mask, decoder.vocabulary)
    batch, length = prompt.tokens.shape
    capacity = _checked_capacity(length, max_new_tokens, capacity, decoder.positions)
    _check_lookup(prompt_lookup, batch, temperature)
    if prompt_lookup and not decoder.keeps_keys:
        raise ValueError(
            "generate: prompt_lookup needs a model that can forget tokens again, and a "
            f"{type(model).__name__} keeps a running state; use prompt_lookup=0"
        )
    ends = _end_tokens(model, eos_token_id)
    if pad_token_id is None:
        pad_token_id = _setting(model, "pad_token_id")
    if pad_token_id is None:
        pad_token_id = ends[0] if ends else 0
    pad_token_id = whole("generate", "pad_token_id", pad_token_id, -(2**63), 2**63 - 1)
    stopping = Stopping(ends, stop, tokenizer, batch)
    loop = _Loop(decoder, prompt, sampler, stopping, max_new_tokens, pad_token_id, is_watched)
    return loop.tokens(capacity, prompt_lookup)


@dataclass
class _Prompt:
    """tokens: int64 [batch, length], padding first. padding: int64 [batch], or None for none."""

    tokens: Tensor
    padding: Tensor | None

    def real(self) -> Tensor | None:
        """bool [batch, length], False where padding is; None where there is none."""
        if self.padding is None:
            return None
        return torch.arange(self.tokens.shape[1]) >= self.padding[:, None]


@dataclass
class _Loop:
    """The state of one generation that the steps share.

    is_watched: others run between two tokens, and may change the model.
    """

    decoder: Decoder
    prompt: _Prompt
    sampler: Sampler
    stopping: Stopping
    most: int
    pad: int
    is_watched: bool

    @torch.inference_mode()
    def tokens(self, capacity: int, lookup: int) -> Iterator[Tensor]:
        """The new tokens [batch]; with lookup, several of them come from one step of the model."""
        batch = len(self.prompt.tokens)
        self.sampler.begin(self.prompt.tokens, self.prompt.real(), self.decoder.vocabulary)
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
                following = torch.cat([following, torch.tensor([guesses], dtype=torch.int64)], 1)
            logits = run.step(following, every=True)

    def _choose(self, logits: Tensor) -> Tensor:
        chosen = self.sampler(logits)
        if any(self.stopping.done):
            chosen = chosen.masked_fill(torch.tensor(self.stopping.done), self.pad)
        return chosen


def _checked_prompt(ids: Tensor, mask: Tensor | None, vocabulary: int) -> _Prompt:
    """The prompts with their padding before them; raises ValueError where they make no sense."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"generate: expected input_ids int64 [batch, length], got {shown}")
    if ids.numel() == 0:
        raise ValueError(
            f"generate: input_ids {list(ids.shape)} has no token; an empty prompt needs at least "
            "the model's start token"
        )
    ids = ids.long()
    if mask is not None and bool((mask != 0).all()):
        mask = None if mask.shape == ids.shape else mask
    padding = None
    if mask is not None:
        ids, padding = _padded_first(ids, mask)
    real = ids if padding is None else ids[torch.arange(ids.shape[1]) >= padding[:, None]]
    wrong = (real < 0) | (real >= vocabulary)
    if bool(wrong.any()):
        raise ValueError(
            f"generate: input_ids has the token {int(real[wrong][0])}, the model knows 0 to "
            f"{vocabulary - 1}; is the tokenizer that of the model?"
        )
    return _Prompt(ids, padding)


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
        raise ValueError(f"generate: row {row} of attention_mask has no token; a prompt is empty")
    length = ids.shape[1]
    first = real.int().argmax(1)
    places = torch.arange(length)
    if not bool(
        (real == ((places >= first[:, None]) & (places < (first + counts)[:, None]))).all()
    ):
        raise ValueError(
            "generate: expected attention_mask with padding only before or only after each "
            "prompt, got tokens on both sides of padding"
        )
    shifted = (places - (length - counts - first)[:, None]) % length
    # Padding may be any number; the model reads it all the same.
    ids = torch.where(real, ids, 0).gather(1, shifted)
    return ids, length - counts


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
            f"{positions} positions that the model was made for"
        )
    return wanted if capacity is None else capacity


def _check_lookup(lookup: int, batch: int, temperature: float) -> None:
    lookup = whole("generate", "prompt_lookup", lookup, 0, MOST_GUESSES)
    if lookup and batch != 1:
        raise ValueError(f"generate: prompt_lookup takes a single sequence, got {batch}")
    if lookup and temperature:
        raise ValueError(f"generate: prompt_lookup needs temperature 0, got {temperature}")


def _setting(model: nn.Module, name: str) -> Any:
    """A setting of the model's generation_config, else of its config."""
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return None


def _end_tokens(model: nn.Module, given: int | Sequence[int] | None) -> list[int]:
    found: Any = _setting(model, "eos_token_id") if given is None else given
    if found is None:
        return []
    if isinstance(found, Tensor):
        found = found.tolist()
    tokens = found if isinstance(found, Iterable) and not isinstance(found, str) else [found]
    return [whole("generate", "eos_token_id", token, -1) for token in tokens]
