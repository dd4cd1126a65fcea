"""Language models by their shape alone, with random weights: nothing has to be downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_BLOCK = (1 << 20) - 3
"""Random numbers that are drawn, and then repeated; a prime, so that no two rows are the same."""


@dataclass(frozen=True)
class Shape:
    """A configuration of `transformers`: its class and the arguments that differ from it."""

    config: str
    settings: Mapping[str, Any]


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, words: int) -> Shape:
    return Shape(
        "LlamaConfig",
        {
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": words,
            "max_position_embeddings": 4096,
        },
    )


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, words: int) -> Shape:
    llama = _llama(hidden, mlp, layers, heads, kv_heads, words)
    return Shape("Qwen3Config", {**llama.settings, "head_dim": 128, "tie_word_embeddings": True})


SHAPES = {
    "tiny": _llama(256, 512, 2, 4, 2, 1024),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 151936),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 151936),
}
"""Every shape by its name; `tiny` is for trying things out."""


def random_model(name: str, seed: int = 0) -> nn.Module:
    """A causal language model of a shape, bfloat16, in evaluation mode.

    Matrices are normal with a deviation of 1 / sqrt(in_features), so that every part of the model
    counts in its output; norms are one. The same seed gives the same weights in every process.
    Raises ValueError for a name that is not in SHAPES.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choices: {', '.join(SHAPES)}")
    import transformers

    shape = SHAPES[name]
    config = getattr(transformers, shape.config)(**shape.settings)
    make: Any = transformers.AutoModelForCausalLM.from_config
    with _no_weights()():
        model = make(config, dtype=torch.bfloat16)
    model.tie_weights()
    _fill(model, seed)
    made: nn.Module = model.eval()
    return made


def _no_weights() -> Any:
    """transformers' way of making a model without first filling it; it moved in version 5."""
    for module in ("transformers.initialization", "transformers.modeling_utils"):
        if importlib.util.find_spec(module) is not None:
            found = getattr(importlib.import_module(module), "no_init_weights", None)
            if found is not None:
                return found
    raise ImportError("transformers has no no_init_weights; expected a version from 4.50 on")


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed))
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        values = (block.roll(7919 * number) / math.sqrt(parameter.shape[-1])).to(parameter.dtype)
        flat = parameter.view(-1)
        for begin in range(0, flat.numel(), _BLOCK):
            flat[begin : begin + _BLOCK] = values[: flat.numel() - begin]
