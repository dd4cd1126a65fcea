"""What a model's generation_config asks for beside the arguments of `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .language_model import LanguageModel, Settings
from .numbers import real, whole

Processor = Callable[[Tensor, Tensor], Tensor]
"""Takes all tokens so far [batch, n] int64 and scores float32 [batch, vocabulary]; gives others."""

_SEARCHES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "max_time": (None,),
}
"""Settings for another search than `generate`'s, and their values that ask for none."""


def setting(model: nn.Module | LanguageModel, name: str) -> Any:
    """A setting of the model's generation_config, or of its config where it has none, or None."""
    owner: Any = getattr(model, "generation_config", None)
    return getattr(getattr(model, "config", None) if owner is None else owner, name, None)


def check_search(model: nn.Module | LanguageModel) -> None:
    """Raises ValueError where the generation_config asks for a search that is not `generate`'s."""
    for name, idle in _SEARCHES.items():
        value = setting(model, name)
        if not any(value is one or value == one for one in idle):
            _refuse(name, value, idle[-1])
    if setting(model, "cache_implementation") == "quantized":
        _refuse("cache_implementation", "quantized", None)


def kept_settings(model: nn.Module) -> Settings:
    """What a file keeps of a model's generation_config; raises ValueError where that is not all."""
    check_search(model)
    # With an end token and settings for scores but the penalty: what asks for more shows.
    found = processor_of(
        model, torch.zeros(1, 1, dtype=torch.int64, device="cpu"), None, 1, [0], 1.0
    )
    if found is not None:
        names = ", ".join(type(each).__name__ for each in found)  # type: ignore[attr-defined]
        raise ValueError(
            "expected a generation_config whose only setting for scores is repetition_penalty, got "
            f"one that takes transformers' code ({names}); set what asks for it to None"
        )
    ends = setting(model, "eos_token_id")
    ends = ends.tolist() if isinstance(ends, Tensor) else ends
    strings = setting(model, "stop_strings")
    penalty = setting(model, "repetition_penalty")
    return checked_settings(
        {
            "eos_token_id": [] if ends is None else ends if isinstance(ends, list) else [ends],
            "pad_token_id": setting(model, "pad_token_id"),
            "stop_strings": [strings] if isinstance(strings, str) else strings or None,
            "repetition_penalty": None if penalty is None else float(penalty),
        }
    )


def checked_settings(data: dict[str, Any]) -> Settings:
    """The settings that a file tells of; raises ValueError where it tells of others."""
    names = [each.name for each in fields(Settings)]
    if {*data} != {*names}:
        raise ValueError(f"expected settings {', '.join(names)}, got {str(data)[:100]}")
    ends, strings = data["eos_token_id"], data["stop_strings"]
    if not isinstance(ends, list) or not all(type(each) is int for each in ends):
        raise ValueError(f"expected eos_token_id to be a list of tokens, got {str(ends)[:100]}")
    for token in (*ends, *([] if data["pad_token_id"] is None else [data["pad_token_id"]])):
        whole("generate", "a token", token, -(2**63), 2**63 - 1)
    if strings is not None and not (
        isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    ):
        raise ValueError(f"expected stop_strings to be a list of texts, got {str(strings)[:100]}")
    if data["repetition_penalty"] is not None:
        checked_penalty(data["repetition_penalty"])
    return Settings(**data)


def _refuse(name: str, value: Any, idle: Any) -> None:
    raise ValueError(
        f"generate: expected {name} {idle!r} in the model's generation_config, got {value!r}, "
        "which llm.generate does not serve; use model.generate, or set "
        f"model.generation_config.{name} to {idle!r}"
    )


def checked_penalty(value: float) -> float:
    """A repetition_penalty; raises ValueError for one that is out of range."""
    penalty = real("generate", "repetition_penalty", value, "> 0")
    if penalty <= 0.0:
        raise ValueError(f"generate: expected repetition_penalty > 0, got {value}")
    return penalty


def processor_of(
    model: Any,
    tokens: Tensor,
    mask: Tensor | None,
    new: int,
    ends: list[int],
    repetition_penalty: float | None,
) -> Processor | None:
    """What `model.generate` does to scores before it takes the likeliest token, or None.

    Made by transformers of the model's generation_config: penalties, tokens that are forced,
    suppressed or made likelier, n-grams that must not repeat, a least length.
    tokens: int64 [batch, length], the prompts, padded on the left; mask: int64 of its shape, 0
        where padding is, or None.
    new: the most new tokens.
    ends: tokens that end a sequence.
    repetition_penalty: in place of the generation_config's, or None.

    Raises ValueError for what transformers does not take.
    """
    if isinstance(model, LanguageModel):
        given = repetition_penalty is None
        penalty = model.generation_config.repetition_penalty if given else repetition_penalty
        if penalty is None or checked_penalty(penalty) == 1.0:
            return None
        return RepetitionPenalty(penalty, None if mask is None else (mask != 0).int().argmax(1))
    import transformers

    length = tokens.shape[1]
    library: Any = transformers
    config = _filled(copy.deepcopy(model.generation_config) or library.GenerationConfig())
    if repetition_penalty is not None:
        config.repetition_penalty = checked_penalty(repetition_penalty)
    config.do_sample = False
    config.num_beams = 1
    config.max_length = length + new
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens
    config._eos_token_tensor = torch.tensor(ends, device="cpu") if ends else None
    own = getattr(model, "_get_logits_processor", None)
    found = (own or partial(library.GenerationMixin._get_logits_processor, model))(
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=tokens,
        device="cpu",
        model_kwargs={"attention_mask": torch.ones_like(tokens) if mask is None else mask},
    )
    return found if len(found) else None


def _filled(config: Any) -> Any:
    """The config with defaults for settings that are None, as `model.generate` fills them."""
    # transformers 5 keeps None for what nobody set; before, its constructor had the defaults.
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    for name, value in defaults.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config


@dataclass(frozen=True)
class RepetitionPenalty:
    """What transformers' processor of this name does, for models from files.

    padding: int64 [batch], the number of tokens at the start of each sequence that do not count, or
    None. Source: Keskar et al., CTRL, 2019, section 4.1.
    """

    penalty: float
    padding: Tensor | None

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        places = tokens.clamp(max=size)
        if self.padding is not None:
            is_padding = torch.arange(tokens.shape[1], device="cpu") < self.padding[:, None]
            places = places.masked_fill(is_padding, size)
        wide = F.pad(scores, (0, 1))  # a place for what does not count
        found = wide.gather(1, places)
        found = torch.where(found < 0, found * self.penalty, found / self.penalty)
        return wide.scatter(1, places, found)[:, :size]
