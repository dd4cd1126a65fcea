"""Ops: mathematical operations with a kernel, a reference and a name."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .. import _lazy
from . import _binding

if TYPE_CHECKING:
    from ._op import Cost, Op, Sample
    from .activation import activation
    from .add_layer_norm import add_layer_norm
    from .add_rms_norm import add_rms_norm
    from .attention import attention
    from .cached_attention import cached_attention
    from .convolution_panels import convolution_panels
    from .depthwise_convolution import depthwise_convolution
    from .dequantize_per_tensor import dequantize_per_tensor
    from .embedding_bag import embedding_bag
    from .gelu_mul import gelu_mul
    from .global_norm import global_norm
    from .interaction import interaction
    from .layer_norm import layer_norm
    from .linear_panels import linear_panels
    from .mean_squares import mean_squares
    from .merged_embedding_bag import merged_embedding_bag
    from .moe import moe
    from .optimizer_step import optimizer_step
    from .pack_panels import pack_panels
    from .pool import pool
    from .quantize_per_tensor import quantize_per_tensor
    from .quantize_weight import quantize_weight
    from .quantized_convolution import quantized_convolution
    from .quantized_embedding_bag import quantized_embedding_bag
    from .quantized_gru import quantized_gru
    from .quantized_linear import quantized_linear
    from .quantized_lstm import quantized_lstm
    from .quantized_merged_embedding_bag import quantized_merged_embedding_bag
    from .rms_norm import rms_norm
    from .rotary_embedding import rotary_embedding
    from .scale_channels import scale_channels
    from .silu_mul import silu_mul
    from .softmax import softmax
    from .unpack_panels import unpack_panels

__all__ = [
    "Cost",
    "Op",
    "Sample",
    "activation",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cached_attention",
    "convolution_panels",
    "depthwise_convolution",
    "dequantize_per_tensor",
    "embedding_bag",
    "gelu_mul",
    "global_norm",
    "interaction",
    "layer_norm",
    "linear_panels",
    "mean_squares",
    "merged_embedding_bag",
    "moe",
    "optimizer_step",
    "pack_panels",
    "pool",
    "quantize_per_tensor",
    "quantize_weight",
    "quantized_convolution",
    "quantized_embedding_bag",
    "quantized_gru",
    "quantized_linear",
    "quantized_lstm",
    "quantized_merged_embedding_bag",
    "registry",
    "rms_norm",
    "rotary_embedding",
    "scale_channels",
    "silu_mul",
    "softmax",
    "unpack_panels",
]


def registry(computed_by: str = "oxytorch") -> dict[str, Op]:
    """All ops by name, in name order: those with kernels of "oxytorch", or those of "onednn"."""
    from ._op import registered

    for name in _NAMES if computed_by == "oxytorch" else _ONEDNN:
        importlib.import_module(f"{__name__}.{name}")
    return registered(computed_by)


_RECORDS = ("Cost", "Op", "Sample")
_NAMES = [name for name in __all__ if name not in (*_RECORDS, "registry")]
_ONEDNN = ("convolution", "linear", "lstm")
_LATER = {**{name: name for name in _NAMES}, **dict.fromkeys(_RECORDS, "_op")}
sys.modules[__name__].__class__ = _lazy.Package
_binding.connect_all(_NAMES)
