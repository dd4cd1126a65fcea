"""Models of transformers with few, random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(name: str, **settings: Any) -> Any:
    """A model of a class, such as "BertModel", in evaluation mode, with these settings."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings)).eval()


def tiny_llama(seed: int | None = None, **settings: Any) -> Any:
    """A Llama of two layers, each 64 wide, where `settings` does not say otherwise.

    seed: of its weights; None goes on with the random numbers of the process.
    """
    if seed is not None:
        torch.manual_seed(seed)
    return tiny("LlamaForCausalLM", **{**_LLAMA, **settings})
