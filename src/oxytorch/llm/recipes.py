"""What the parts of decoder layers are called, and the orders in which they are put together.

This is data: `matching.py` looks for these names, and a plan is used only after it was tried on
numbers. A model whose authors chose other names needs a word here.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("self_attn", "self_attention", "attention", "attn")
QUERY = ("q_proj", "query", "wq")
KEY = ("k_proj", "key", "wk")
VALUE = ("v_proj", "value", "wv")
JOINED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
QUERY_NORM = ("q_norm", "query_layernorm", "q_layernorm")
KEY_NORM = ("k_norm", "key_layernorm", "k_layernorm")
SINKS = ("sinks",)

MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "")
"""Where the MLP's layers are; "" is the decoder layer itself."""
GATE = ("gate_proj", "w1")
UP = ("up_proj", "w3")
DOWN = ("down_proj", "w2", "dense_4h_to_h", "fc2", "c_proj", "fc_out")
GATE_UP = ("gate_up_proj",)
PLAIN_UP = ("up_proj", "dense_h_to_4h", "fc1", "c_fc", "fc_in")
ACTIVATION = ("act_fn", "activation_fn", "act", "activation")

ROUTER = ("gate", "router")
EXPERTS = ("experts",)
CHOSEN = ("top_k", "num_experts_per_tok")

HEAD_DIM = ("head_dim", "head_size", "attention_head_size")
SCALE = ("scaling", "scale", "inv_norm_factor")
WINDOW = ("sliding_window",)
SOFTCAP = ("attn_logit_softcapping", "logit_cap")

RESIDUAL_SCALE = ("residual_multiplier",)

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")
KNOWN_ARGUMENTS = (
    "hidden_states",
    "attention_mask",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_hidden_states",
)
"""Arguments of a decoder layer that its fused form reads itself or has no use for."""


@dataclass(frozen=True)
class BlockOrder:
    """An order of norms and parts. The norms are names to look for; an empty tuple is no norm.

    The words are those of `layer.DecoderLayer`.
    """

    name: str
    attention_norm: tuple[str, ...] = ()
    mlp_norm: tuple[str, ...] = ()
    after_attention_norm: tuple[str, ...] = ()
    after_mlp_norm: tuple[str, ...] = ()
    parallel: bool = False
    norm_last: bool = False


_FIRST = ("input_layernorm", "self_attn_layer_norm", "ln_1", "ln_attn", "attention_norm", "norm1")
_SECOND = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "final_layer_norm",
    "ln_2",
    "ln_mlp",
    "ffn_norm",
    "norm2",
)
_AFTER_ATTENTION = ("post_attention_layernorm", "post_self_attn_layernorm")
_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")

BLOCK_ORDERS = (
    BlockOrder("norm, attention, norm, MLP", _FIRST, _SECOND),
    BlockOrder("a norm before and behind each part", _FIRST, _SECOND, _AFTER_ATTENTION, _AFTER_MLP),
    BlockOrder("attention and MLP in parallel", _FIRST, _SECOND, parallel=True),
    BlockOrder("attention and MLP in parallel behind one norm", _FIRST, parallel=True),
    BlockOrder("a norm behind each part", (), (), _AFTER_ATTENTION, _AFTER_MLP),
    BlockOrder("a norm behind each sum", _FIRST, _SECOND, norm_last=True),
)
"""Tried in this order."""
