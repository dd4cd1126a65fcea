"""Whether the parts of a record fit each other: asked of records that come from files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.panels import PanelWeight
from ..ops.panels.epilogues import ACTIVATIONS
from ..quantization.described import check_order
from .cache import DTYPES
from .layer import Attention, DecoderLayer, Mlp, Norm, Product, RoutedMlp
from .record import Angles, FusedModel, HeadProduct, RotaryTable

_MOST = 1 << 31
"""Heads, and sizes of them, are fewer."""

_FLOATING = (torch.float32, torch.bfloat16)


def _want(is_right: bool, what: str, given: object) -> None:
    if not is_right:
        raise ValueError(f"expected {what}, got {str(given)[:100]}")


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check(model: FusedModel) -> None:
    """Raise ValueError that names the first part of a record that does not fit the others."""
    _want(model.dtype in _FLOATING, "activations of float32 or bfloat16", model.dtype)
    _want(model.cache_dtype in DTYPES.values(), "a cache of a known dtype", model.cache_dtype)
    weight = _table(model.embedding, "the embedding", model.dtype)
    width = weight.shape[1]
    if model.positions is not None:
        rows, before = model.positions
        table = _table(rows, "the table of positions", model.dtype)
        _want(table.shape[1] == width, f"positions of {width} values", list(table.shape))
        _want(0 <= before < table.shape[0], "a first position that is in its table", before)
    for each in model.tables:
        _check_angles(each)
    _want(bool(model.layers), "at least one layer", 0)
    have = len(model.rotary)
    _want(have == len(model.layers), f"{len(model.layers)} layers' rotary tables", have)
    for index, (layer, place) in enumerate(zip(model.layers, model.rotary, strict=True)):
        known = place is None or 0 <= place < len(model.tables)
        _want(known, f"layer {index} to have one of {len(model.tables)} rotary tables", place)
        try:
            _check_layer(layer, width, None if place is None else model.tables[place])
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from error
    if model.norm is not None:
        _check_norm(model.norm, width, "the last norm")
    _want(not isinstance(model.head, HeadProduct), "a head of its own", "a module's")
    assert isinstance(model.head, Product)
    _check_product(model.head, width, None, "the head")


def _table(module: nn.Module, what: str, dtype: torch.dtype) -> Tensor:
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, PanelWeight):
        raise ValueError(f"expected {what} to be a plain tensor, got {type(weight).__name__}")
    is_table = weight.dim() == 2 and weight.numel() > 0 and weight.dtype == dtype
    _want(is_table, f"{what} to be {dtype} [rows, width]", _shown(weight))
    return weight


def _check_angles(table: RotaryTable) -> None:
    angles = table.rotation
    if not isinstance(angles, Angles):
        raise ValueError("expected angles of a rotary table, got a module")
    _want(table.dtype in _FLOATING, "angles of float32 or bfloat16", table.dtype)
    found = angles.frequencies
    is_row = found.dim() == 1 and found.dtype == torch.float32
    _want(is_row, "frequencies float32 [rotary]", _shown(found))


def _check_layer(layer: DecoderLayer, width: int, table: RotaryTable | None) -> None:
    _check_attention(layer.attention, width, table)
    norms = (layer.attention_norm, layer.mlp_norm, layer.after_attention_norm, layer.after_mlp_norm)
    for norm in norms:
        if norm is not None:
            _check_norm(norm, width, "a norm")
    if layer.norm_last:
        both = layer.attention_norm is not None and layer.mlp_norm is not None
        _want(both, "norms behind both sums", layer.description)
    mlp = layer.mlp
    is_gated = isinstance(mlp, RoutedMlp) or mlp.up.gated
    known = mlp.activation_fn + ("_mul" if is_gated else "") in ACTIVATIONS
    _want(known, "a known activation", mlp.activation_fn)
    if isinstance(mlp, Mlp):
        _check_pair(mlp.up, mlp.down, width)
        return
    _check_product(mlp.router, width, len(mlp.gate_up), "the router")
    _want(len(mlp.gate_up) == len(mlp.down), "as many experts up as down", len(mlp.down))
    _want(0 < mlp.chosen <= len(mlp.down), f"1 to {len(mlp.down)} experts", mlp.chosen)
    for up, down in zip(mlp.gate_up, mlp.down, strict=True):
        _check_pair(up, down, width)


def _check_pair(up: Product, down: Product, width: int) -> None:
    middle = _check_product(up, width, None, "the MLP's first product")
    if up.gated:
        _want(middle % 2 == 0, "gate and up of one size", middle)
        middle //= 2
    _check_product(down, middle, width, "the MLP's second product")


def _check_attention(attention: Attention, width: int, table: RotaryTable | None) -> None:
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", size)):
        _want(0 < value < _MOST, f"{name} above 0", value)
    _want(heads % kv_heads == 0, f"heads that {kv_heads} key heads share alike", heads)
    _want(attention.layout in ("blocks", "groups"), "a known order of heads", attention.layout)
    _check_product(attention.qkv, width, (heads + 2 * kv_heads) * size, "query, key and value")
    _check_product(attention.output, heads * size, width, "the attention's output")
    for norm, count in ((attention.query_norm, heads), (attention.key_norm, kv_heads)):
        if norm is not None:
            _check_norm(norm, size * (count if attention.flat_norms else 1), "a norm of heads")
    both = attention.query_norm is not None and attention.key_norm is not None
    _want(both or not attention.flat_norms, "norms of queries and keys", "none")
    window, sinks = attention.window, attention.sinks
    _want(window is None or 0 < window < 1 << 62, "a window above 0", window)
    _want(sinks is None or sinks.shape == (heads,), f"sinks of {heads} heads", sinks)
    cap = attention.softcap
    _want(cap is None or cap > 0, "a softcap above 0", cap)
    rotary = attention.rotary
    _want(0 <= rotary <= size and rotary % 2 == 0, f"up to {size} rotated values", rotary)
    if rotary:
        have = 0
        if table is not None and isinstance(table.rotation, Angles):
            have = table.rotation.frequencies.shape[0]
        _want(have == rotary, f"angles of {rotary} values", have)


def _check_norm(norm: Norm, width: int, what: str) -> None:
    _want(norm.kind in ("rms_norm", "layer_norm"), f"{what} of a known kind", norm.kind)
    for name in ("weight", "bias"):
        tensor = norm.module._parameters.get(name)
        if tensor is not None:
            is_row = tensor.shape == (width,) and tensor.dtype in _FLOATING
            is_row = is_row and not isinstance(tensor, PanelWeight)
            _want(is_row, f"{what} with {width} values", f"{name} {_shown(tensor)}")


def _check_product(product: Product, inputs: int, outputs: int | None, what: str) -> int:
    """Returns its outputs. outputs: how many these have to be, or None."""
    weight = product.weight
    shape: list[int] = [*weight.shape]
    is_matrix = len(shape) == 2 and shape[1] == inputs and shape[0] > 0
    _want(is_matrix, f"{what} of {inputs} inputs", shape)
    _want(outputs in (None, shape[0]), f"{what} of {outputs} outputs", shape)
    if isinstance(weight, PanelWeight):
        _want(weight.is_gated == product.gated, f"{what} gated or not", weight.is_gated)
    else:
        _want(weight.dtype in _FLOATING, f"{what} of float32 or bfloat16", weight.dtype)
    bias = product.bias
    if bias is not None:
        is_row = bias.shape == (shape[0],) and bias.dtype in _FLOATING
        _want(is_row, f"{what} with a bias of {shape[0]} values", _shown(bias))
    check_order(product.order, inputs)
    return shape[0]
