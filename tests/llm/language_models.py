"""Small language models of many families, with random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 200

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "alibi": False,
    "bias": False,
    "eos_token_id": None,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 32, "sliding_window": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": ("Phi3Config", {**_GROUPED, "sliding_window": 8}),
    "phi4": ("Phi3Config", {**_GROUPED, "partial_rotary_factor": 0.75, "head_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "rotary_pct": 0.25}),
    "opt": (
        "OPTConfig",
        {
            **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
        },
    ),
    "falcon": (
        "FalconConfig",
        {**_FALCON, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    ),
    "falcon_grouped": (
        "FalconConfig",
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "n_positions": 256,
            "eos_token_id": None,
            "bos_token_id": 1,
        },
    ),
    "opt_norms_last": (
        "OPTConfig",
        {
            **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "do_layer_norm_before": False,
        },
    ),
    "glm": ("GlmConfig", {**_GROUPED, "head_dim": 16}),
    "granite": (
        "GraniteConfig",
        {
            **_GROUPED,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2Config", _GROUPED),
    "smollm3": ("SmolLM3Config", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "cohere": ("CohereConfig", {**_GROUPED, "logit_scale": 0.5}),
}
"""Name -> class of the configuration and its arguments. All layers of these can be fused."""

LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": (
        "GPTJConfig",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 8,
            "vocab_size": VOCABULARY,
            "eos_token_id": None,
        },
    ),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    ),
}
"""Families whose layers compute what no recipe says."""


def build(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a family in evaluation mode; its weights are large enough to tell tokens apart."""
    kind, arguments = {**FAMILIES, **LEFT}[family]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    result: nn.Module = model.to(dtype)
    return result


def prompt(batch: int = 2, length: int = 21) -> dict[str, Tensor]:
    """Token ids of a batch, the last sequence padded on the left by five tokens."""
    ids = torch.randint(3, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Logits of all tokens that no padding precedes, in float32."""
    with torch.no_grad():
        found = model(**given).logits.float()
    return found[given["attention_mask"].bool()]


def distance(found: Tensor, expected: Tensor) -> float:
    """Size of the difference as a fraction of the size of what is expected."""
    return float((found - expected).norm() / expected.norm())


def usual_distance(found: Tensor, expected: Tensor) -> float:
    """The median of the tokens' distances: a router that changes its mind changes single tokens."""
    gaps = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(gaps.median())


def tokens(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """What `model.generate` appends."""
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    result: Tensor = model.generate(**copy.deepcopy(given), **settings)
    return result[:, given["input_ids"].shape[1] :]
