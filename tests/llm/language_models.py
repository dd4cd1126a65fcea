"""Small language models of many families, with random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxytorch import llm

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
    "cohere2": (
        "Cohere2Config",
        {
            **_GROUPED,
            "logit_scale": 0.5,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""Name -> class of the configuration and its arguments. All layers of these can be fused."""

_HEADS = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "eos_token_id": None}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OPT = {**{k: v for k, v in _COMMON.items() if k != "intermediate_size"}, "ffn_dim": 128}

LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJConfig", {**_HEADS, "rotary_dim": 8}),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    ),
}
"""Families whose layers compute what no recipe says."""

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "opt_projected": ("OPTConfig", {**_OPT, "word_embed_proj_dim": 32}),
    "opt_350m": (
        "OPTConfig",
        {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "falcon_rw": (
        "FalconConfig",
        {**_FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    ),
    "falcon_rotary_bias": (
        "FalconConfig",
        {**_FALCON, "bias": True, "multi_query": False, "parallel_attn": False},
    ),
    "xglm": (
        "XGLMConfig",
        {
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_ROUTED, "head_dim": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_GROUPED, **_ROUTED, "shared_expert_intermediate_size": 32},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {**_GROUPED, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
            "laurel_rank": 8,
            "sliding_window": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "nemotron": ("NemotronConfig", {**_GROUPED, "head_dim": 16}),
    "mpt": (
        "MptConfig",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": VOCABULARY,
            "max_seq_len": 256,
            "eos_token_id": None,
        },
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "eos_token_id": None,
        },
    ),
    "codegen": ("CodeGenConfig", {**_HEADS, "rotary_dim": 8}),
    "stablelm": ("StableLmConfig", _GROUPED),
    "gpt_bigcode": ("GPTBigCodeConfig", {**_HEADS, "n_positions": 256}),
    "roberta": (
        "RobertaConfig",
        {**_COMMON, "is_decoder": True, "max_position_embeddings": 258},
    ),
    "ctrl": (
        "CTRLConfig",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "dff": 128,
            "vocab_size": VOCABULARY,
            "n_positions": 256,
        },
    ),
}
"""Families that are taken; which layers of them are fused is their own affair."""

_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {**_COMMON, "state_size": 8}),
    "mamba2": (
        "Mamba2Config",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "eos_token_id": None,
            "pad_token_id": 0,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "lru_width": 64,
            "attention_window_size": 16,
            "eos_token_id": None,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "bamba": (
        "BambaConfig",
        {**_GROUPED, **_MAMBA_2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_GROUPED, **_LINEAR, **_ROUTED, "shared_expert_intermediate_size": 32},
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **_GROUPED,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**_GROUPED, **_MAMBA_2, "mamba_d_ssm": 128}),
    "openai_gpt": (
        "OpenAIGPTConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256},
    ),
    "rwkv": (
        "RwkvConfig",
        {
            "hidden_size": 64,
            "attention_hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "context_length": 128,
            "eos_token_id": None,
        },
    ),
}
"""Families that keep a running state, or nothing, of earlier tokens."""


def build(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a family in evaluation mode; its weights are large enough to tell tokens apart."""
    kind, arguments = {**FAMILIES, **LEFT, **MORE, **STATES}[family]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name and "A_log" not in name:
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


def assert_follows(fast: Any, model: Any, given: dict[str, Tensor], before: Tensor) -> None:
    """Logits, tokens and losses are those of a model that was changed as the fast one was.

    before: the logits before the change, which has to show.
    """
    ids, text = given["input_ids"], torch.randint(3, VOCABULARY, (21,))
    expected = logits(model, given)
    assert distance(before, expected) > 1e-3, "the change has to show"
    assert distance(logits(fast, given), expected) < 1e-5
    wanted = tokens(model, given, max_new_tokens=8)
    assert torch.equal(tokens(fast, given, max_new_tokens=8), wanted)
    found = llm.generate(fast, ids, max_new_tokens=8)
    assert torch.equal(found[:, ids.shape[1] :], wanted)
    losses = [llm.token_losses(one, text, window=20) for one in (model, fast)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
