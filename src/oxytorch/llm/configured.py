"""What a model's generation_config asks for beside the arguments of `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .numbers import real

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


def setting(model: nn.Module, name: str) -> Any:
    """A setting of the model's generation_config, or of its config where it has none, or None."""
    owner: Any = getattr(model, "generation_config", None)
    return getattr(getattr(model, "config", None) if owner is None else owner, name, None)


def check_search(model: nn.Module) -> None:
    """Raises ValueError where the generation_config asks for a search that is not `generate`'s."""
    for name, idle in _SEARCHES.items():
        value = setting(model, name)
        if not any(value is one or value == one for one in idle):
            _refuse(name, value, idle[-1])
    if setting(model, "cache_implementation") == "quantized":
        _refuse("cache_implementation", "quantized", None)


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
    where padding is, or None. new: the most new tokens. ends: tokens that end a sequence.
    repetition_penalty: in place of the generation_config's, or None.
    Raises ValueError for what transformers does not take.
    """
    import transformers

    length = tokens.shape[1]
    library: Any = transformers
    config = copy.deepcopy(model.generation_config) or library.GenerationConfig()
    if repetition_penalty is not None:
        config.repetition_penalty = checked_penalty(repetition_penalty)
    config.do_sample = False
    config.num_beams = 1
    config.max_length = length + new
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    own = getattr(model, "_get_logits_processor", None)
    found = (own or partial(library.GenerationMixin._get_logits_processor, model))(
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=tokens,
        device="cpu",
        model_kwargs={"attention_mask": torch.ones_like(tokens) if mask is None else mask},
    )
    return found if len(found) else None
