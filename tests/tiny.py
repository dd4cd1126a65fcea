"""Small models, those of transformers with few, random weights among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class TiedEmbedding(nn.Module):
    """An embedding whose weight is the output layer's too, with the names of transformers."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(ids))))


class Formula(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


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
