"""Ops: mathematical operations with a kernel, a reference and a name."""

from __future__ import annotations

from ._op import Cost, Op, Sample, registry
from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .attention import attention
from .cached_attention import cached_attention
from .embedding_bag import embedding_bag
from .gelu_mul import gelu_mul
from .global_norm import global_norm
from .interaction import interaction
from .layer_norm import layer_norm
from .linear_bf16 import linear_bf16
from .linear_int4 import linear_int4
from .linear_int8 import linear_int8
from .linear_nf4 import linear_nf4
from .merged_embedding_bag import merged_embedding_bag
from .moe import moe
from .rms_norm import rms_norm
from .rotary_embedding import rotary_embedding
from .silu_mul import silu_mul
from .softmax import softmax

__all__ = [
    "Cost",
    "Op",
    "Sample",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cached_attention",
    "embedding_bag",
    "gelu_mul",
    "global_norm",
    "interaction",
    "layer_norm",
    "linear_bf16",
    "linear_int4",
    "linear_int8",
    "linear_nf4",
    "merged_embedding_bag",
    "moe",
    "registry",
    "rms_norm",
    "rotary_embedding",
    "silu_mul",
    "softmax",
]
