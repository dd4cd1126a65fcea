"""Wrong arguments: the error names the op, the argument, and the wanted and the given value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import CONVOLUTION

from marks import NEEDS_LIBRARY
from oxytorch import ops

pytestmark = NEEDS_LIBRARY


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def codes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


TABLE, BAGS = ones(9, 4), whole(0, 2)

# A weight of 16 outputs and 64 in_features.
INT4 = ("int4", codes(512), ones(16), None, None, 16)
INT8 = ("int8", codes(1024), ones(16), None, None, 16)


IMAGES = ones(1, 4, 5, 5)


def convolution(x: torch.Tensor, **changed: Any) -> torch.Tensor:
    """A convolution of 3 x 3 with 8 outputs, but for what is changed."""
    arguments: dict[str, Any] = {
        "format": "fp32",
        "panels": codes(4096),
        **CONVOLUTION,
    }
    return ops.convolution_panels(x, **arguments | changed)


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return ops.depthwise_convolution(x, weight, bias, None, [1, 1], [0] * 4, [1, 1])


def pool(x: torch.Tensor, kind: str, **changed: Any) -> torch.Tensor:
    """Pooling of windows of 3 x 3, but for what is changed."""
    arguments: dict[str, Any] = {
        "kernel_size": [3, 3],
        "stride": [1, 1],
        "padding": [0] * 4,
        "dilation": [1, 1],
    }
    return ops.pool(x, **arguments | changed, kind=kind)


def linear(
    x: torch.Tensor,
    format: str,
    panels: torch.Tensor,
    *scales: torch.Tensor | None,
    **changed: object,
) -> object:
    """linear_panels with 16 outputs; what is not given of scales and zero points is None."""
    missing = (None,) * (3 - len(scales))
    return ops.linear_panels(x, format, panels, *scales, *missing, 16, **changed)  # type: ignore[arg-type]


def routed(indices: torch.Tensor, **changed: object) -> object:
    """moe of two experts [2 x 16, 64] and [64, 16] of bfloat16, with arguments changed."""
    gate_up = [ones(2, 64 * 16 * 2, dtype=torch.uint8)] * 2
    down = [ones(4, 64 * 16 * 2, dtype=torch.uint8)] * 2
    arguments: dict[str, object] = {
        "x": ones(2, 64),
        "router_weights": ones(2, 1),
        "router_indices": indices,
        "gate_up_format": "bf16",
        "gate_up_panels": gate_up,
        "down_format": "bf16",
        "down_panels": down,
        "inner_features": 16,
    }
    for part in ("channel_scales", "group_scales", "zero_points"):
        arguments |= {f"gate_up_{part}": [], f"down_{part}": []}
    return ops.moe(**(arguments | changed))  # type: ignore[arg-type]


def step(rule: str, *hyper: float, **changed: object) -> object:
    """optimizer_step of a parameter of 4 elements, with arguments changed."""
    arguments: dict[str, object] = {
        "parameters": [ones(4)],
        "low_bits": [],
        "gradients": [ones(4)],
        "states": [],
        "scales": [],
        "steps": [],
        "rng_streams": [],
    }
    return ops.optimizer_step(**(arguments | changed), rule=rule, hyper=hyper)  # type: ignore[arg-type]


SGD = ("sgd", 0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
MOVING_SGD = ("sgd", 0.1, 0.9, 0.0, 0.0, 0.0, 0.0)
ADAM = ("adam", 0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0)

CHOICE = torch.zeros(2, 1, dtype=torch.int64)

CASES: list[tuple[str, Callable[[], object]]] = [
    (
        "cached_attention: expected start and length that fit the cache of 4 positions, "
        "got start 4 and length 1; make a larger cache",
        lambda: ops.cached_attention(*[ones(1, 1, 1, 8)] * 3, *[ones(1, 1, 4, 8)] * 2, 4),
    ),
    (
        "pack_panels: expected values of dtype float32, got bfloat16",
        lambda: ops.pack_panels(ones(2, 3, dtype=torch.bfloat16), "fp32"),
    ),
    (
        "pack_panels: expected values of dtype bfloat16, got float32",
        lambda: ops.pack_panels(ones(2, 3), "bf16"),
    ),
    (
        "pack_panels: expected format 'bf16', 'int8', 'int4', 'nf4', 'fp8' or 'fp32', got 'int3'",
        lambda: ops.pack_panels(codes(6).view(2, 3), "int3"),
    ),
    (
        "pack_panels: expected out_features even and of at least 2, got 3",
        lambda: ops.pack_panels(codes(9).view(3, 3), "int8", True),
    ),
    (
        "unpack_panels: expected panels with 512 elements, got [511]",
        lambda: ops.unpack_panels(codes(511), "int4", 16, 64),
    ),
    (
        "quantize_weight: expected group_size that divides in_features 64, got 48",
        lambda: ops.registry()["quantize_weight"].function(ones(4, 64), "int4", 48, True, True),
    ),
    (
        "rms_norm: expected weight of shape [4], got [1, 4]",
        lambda: ops.rms_norm(ones(3, 4), ones(1, 4)),
    ),
    (
        "rms_norm: expected x of dtype float32, bfloat16 or float16 (or float64), got int64",
        lambda: ops.rms_norm(ones(3, 4, dtype=torch.int64)),
    ),
    (
        "rms_norm: expected x with at least 1 dimension(s), got shape []",
        lambda: ops.rms_norm(ones()),
    ),
    (
        "rms_norm: expected weight of dtype float32, got bfloat16",
        lambda: ops.rms_norm(ones(3, 4), ones(4, dtype=torch.bfloat16)),
    ),
    (
        "rms_norm: expected weight of dtype bfloat16 or float32, got float16",
        lambda: ops.rms_norm(ones(3, 4, dtype=torch.bfloat16), ones(4, dtype=torch.float16)),
    ),
    (
        "attention: expected query of shape [batch, heads, length, dim], got [3, 4]",
        lambda: ops.attention(ones(3, 4), ones(1, 1, 3, 4), ones(1, 1, 3, 4)),
    ),
    (
        "attention: expected query of at most 256 in dim, got 257",
        lambda: ops.attention(*[ones(1, 1, 3, 257)] * 3),
    ),
    (
        "attention: expected key of shape [1, heads, keys, 4], got [1, 2, 3, 5]",
        lambda: ops.attention(ones(1, 2, 3, 4), ones(1, 2, 3, 5), ones(1, 2, 3, 5)),
    ),
    (
        "attention: expected key with a number of heads that divides the query's 3, got 2",
        lambda: ops.attention(ones(1, 3, 3, 4), ones(1, 2, 3, 4), ones(1, 2, 3, 4)),
    ),
    (
        "attention: expected value of shape [1, 2, 3, 4], got [1, 2, 5, 4]",
        lambda: ops.attention(ones(1, 2, 3, 4), ones(1, 2, 3, 4), ones(1, 2, 5, 4)),
    ),
    (
        "attention: expected mask that broadcasts to shape [1, 2, 3, 5], got [2, 5, 3]",
        lambda: ops.attention(*[ones(1, 2, n, 4) for n in (3, 5, 5)], ones(2, 5, 3)),
    ),
    (
        "global_norm: expected tensors of dtype float32, bfloat16 or float16 (or float64), "
        "got int64",
        lambda: ops.global_norm([ones(3, 4), ones(2, dtype=torch.int64)]),
    ),
    (
        "layer_norm: expected bias of shape [4], got [5]",
        lambda: ops.layer_norm(ones(3, 4), ones(4), ones(5)),
    ),
    (
        "layer_norm: expected bias of dtype bfloat16, got float32",
        lambda: ops.layer_norm(
            ones(3, 4, dtype=torch.bfloat16), ones(4, dtype=torch.bfloat16), ones(4)
        ),
    ),
    (
        "add_rms_norm: expected residual of shape [3, 4], got [4, 3]",
        lambda: ops.add_rms_norm(ones(3, 4), ones(4, 3)),
    ),
    (
        "add_layer_norm: expected residual of dtype float32, got bfloat16",
        lambda: ops.add_layer_norm(ones(3, 4), ones(3, 4, dtype=torch.bfloat16)),
    ),
    (
        "silu_mul: expected up of shape [3, 4], got [3, 1]",
        lambda: ops.silu_mul(ones(3, 4), ones(3, 1)),
    ),
    (
        "gelu_mul: expected approximate 'none' or 'tanh', got 'fast'",
        lambda: ops.gelu_mul(ones(3, 4), ones(3, 4), "fast"),
    ),
    (
        "scale_channels: expected factors of shape [1, 3, 1, 1], got [3]",
        lambda: ops.scale_channels(ones(1, 3, 4, 4), ones(3)),
    ),
    (
        "activation: expected x of dtype float32, bfloat16 or float16 (or float64), got int64",
        lambda: ops.activation(whole(3), "clamp", [0.0, 1.0]),
    ),
    (
        "activation: expected name one of 'leaky_relu', 'clamp', 'elu', 'power', 'mish', got 'rel",
        lambda: ops.activation(ones(3), "relu", []),
    ),
    (
        "activation: expected numbers 2 for 'clamp', got 1",
        lambda: ops.activation(ones(3), "clamp", [0.0]),
    ),
    (
        "activation: expected numbers a whole exponent from 2 to 8, got 2.500000",
        lambda: ops.activation(ones(3), "power", [2.5]),
    ),
    (
        "softmax: expected mask that broadcasts to shape [3, 4], got [2, 4]",
        lambda: ops.softmax(ones(3, 4), 1.0, ones(2, 4)),
    ),
    (
        "softmax: expected mask of dtype float32, got int64",
        lambda: ops.softmax(ones(3, 4), 1.0, whole(1, 2, 3, 4)),
    ),
    (
        "rotary_embedding: expected x of shape [batch, heads, positions, head_dim], got [3, 4]",
        lambda: ops.rotary_embedding(ones(3, 4), ones(3, 4), ones(3, 4)),
    ),
    (
        "rotary_embedding: expected sin of shape [5, 4], got [6, 4]",
        lambda: ops.rotary_embedding(ones(2, 3, 5, 4), ones(5, 4), ones(6, 4)),
    ),
    (
        "rotary_embedding: expected cos with an even last dimension of at most 4, got [5, 6]",
        lambda: ops.rotary_embedding(ones(2, 3, 5, 4), ones(5, 6), ones(5, 6)),
    ),
    (
        "embedding_bag: expected indices in [0, 9), got 9",
        lambda: ops.embedding_bag(TABLE, whole(1, 9, 3), BAGS),
    ),
    (
        "embedding_bag: expected indices in [0, 9), got -1",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, -1), BAGS),
    ),
    (
        "embedding_bag: expected offsets to ascend from 0 to at most 3, got a bag from 4 to 3",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3), whole(0, 4)),
    ),
    (
        "embedding_bag: expected offsets that begin with 0, got 1",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3), whole(1, 2)),
    ),
    (
        "embedding_bag: expected mode 'sum' or 'mean', got 'max'",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3), BAGS, "max"),
    ),
    (
        "embedding_bag: expected offsets with 1-D indices, got None",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3)),
    ),
    (
        "embedding_bag: expected indices of dtype int32 or int64, got float32",
        lambda: ops.embedding_bag(TABLE, ones(3), BAGS),
    ),
    (
        "embedding_bag: expected per_sample_weights of shape [3], got [2]",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3), BAGS, "sum", ones(2)),
    ),
    (
        "embedding_bag: expected per_sample_weights None with mode 'mean', got [3]",
        lambda: ops.embedding_bag(TABLE, whole(1, 2, 3), BAGS, "mean", ones(3)),
    ),
    (
        "merged_embedding_bag: expected indices with 2 tensors, one per table, got 1",
        lambda: ops.merged_embedding_bag([TABLE, TABLE], [whole(1)], [whole(0), whole(0)]),
    ),
    (
        "merged_embedding_bag: expected offsets with 1 bags in every table, got 2",
        lambda: ops.merged_embedding_bag(
            [TABLE, TABLE], [whole(1, 2), whole(1, 2)], [whole(0), BAGS]
        ),
    ),
    (
        "interaction: expected sparse[1] of shape [3, 4], got [3, 5]",
        lambda: ops.interaction(ones(3, 4), [ones(3, 4), ones(3, 5)]),
    ),
    (
        "convolution_panels: expected x of shape [images, channels, 1 to 3 spatial sizes], "
        "got [3, 4]",
        lambda: convolution(ones(3, 4)),
    ),
    (
        "convolution_panels: expected kernel_size of 2 numbers from 1 to 2^31 - 1, got [3]",
        lambda: convolution(IMAGES, kernel_size=[3]),
    ),
    (
        "convolution_panels: expected stride of 2 numbers from 1 to 2^31 - 1, got [1, 0]",
        lambda: convolution(IMAGES, stride=[1, 0]),
    ),
    (
        "convolution_panels: expected padding of 4 numbers from 0 to 2^31 - 1, got [1, 1]",
        lambda: convolution(IMAGES, padding=[1, 1]),
    ),
    (
        "convolution_panels: expected dilation of 2 numbers from 1 to 2^31 - 1, got []",
        lambda: convolution(IMAGES, dilation=[]),
    ),
    (
        "convolution_panels: expected groups that divide the 4 channels of x, got 3",
        lambda: convolution(IMAGES, groups=3),
    ),
    (
        "convolution_panels: expected out_channels a multiple of groups, 4, got 5",
        lambda: convolution(IMAGES, groups=4, out_channels=5),
    ),
    (
        "convolution_panels: expected x that kernels of 9 elements fit into, got 5 with its "
        "padding",
        lambda: convolution(IMAGES, dilation=[1, 4]),
    ),
    (
        "convolution_panels: expected format 'fp32' or 'bf16', got 'int8'",
        lambda: convolution(IMAGES, format="int8"),
    ),
    (
        "convolution_panels: expected panels with 4096 elements, got [512]",
        lambda: convolution(IMAGES, panels=codes(512)),
    ),
    (
        "convolution_panels: expected bias of shape [8], got [9]",
        lambda: convolution(IMAGES, bias=ones(9)),
    ),
    (
        "convolution_panels: expected epilogue without '_mul', got 'silu_mul'",
        lambda: convolution(IMAGES, epilogue="silu_mul"),
    ),
    (
        "convolution_panels: expected other with epilogue 'add_relu', got None",
        lambda: convolution(IMAGES, epilogue="add_relu"),
    ),
    (
        "convolution_panels: expected other of shape [1, 8, 3, 3], got [1, 8, 5, 5]",
        lambda: convolution(IMAGES, other=ones(1, 8, 5, 5), epilogue="add"),
    ),
    (
        "depthwise_convolution: expected weight of shape [*kernel_size, 4], got [3, 3, 5]",
        lambda: depthwise(IMAGES, ones(3, 3, 5)),
    ),
    (
        "depthwise_convolution: expected weight of dtype float32, got bfloat16",
        lambda: depthwise(IMAGES, ones(3, 3, 4, dtype=torch.bfloat16)),
    ),
    (
        "depthwise_convolution: expected weight of at most 64 lines, got 65",
        lambda: depthwise(IMAGES, ones(65, 3, 4)),
    ),
    (
        "depthwise_convolution: expected x of shape [images, channels, 1 to 3 spatial sizes], "
        "got [3, 4]",
        lambda: depthwise(ones(3, 4), ones(3, 3, 4)),
    ),
    (
        "depthwise_convolution: expected bias of shape [4], got [3]",
        lambda: depthwise(IMAGES, ones(3, 3, 4), ones(3)),
    ),
    ("pool: expected kind 'max' or 'mean', got 'sum'", lambda: pool(IMAGES, "sum")),
    (
        "pool: expected x of dtype float32, bfloat16 or float16 (or float64), got int8",
        lambda: pool(IMAGES.to(torch.int8), "mean"),
    ),
    (
        "pool: expected x of dtype float32, bfloat16 or float16 (or float64), got int32",
        lambda: pool(IMAGES.int(), "max"),
    ),
    (
        "pool: expected dilation of ones for 'mean', got 2",
        lambda: pool(IMAGES, "mean", dilation=[1, 2]),
    ),
    (
        "pool: expected x that kernels of 6 elements fit into, got 5 with its padding",
        lambda: pool(IMAGES, "max", kernel_size=[6, 3]),
    ),
    (
        "pool: expected padding of 4 numbers from 0 to 2^31 - 1, got [1, 1]",
        lambda: pool(IMAGES, "max", padding=[1, 1]),
    ),
    (
        "linear_panels: expected panels with 2048 elements, got [2047]",
        lambda: linear(ones(3, 64), "bf16", codes(2047)),
    ),
    (
        "linear_panels: expected panels of dtype uint8, got float32",
        lambda: linear(ones(3, 64), "bf16", ones(2048)),
    ),
    (
        "linear_panels: expected out_features of at least 1, got 0",
        lambda: ops.linear_panels(ones(3, 64), "bf16", codes(0), None, None, None, 0),
    ),
    (
        "linear_panels: expected x with in_features, got [3, 0]",
        lambda: linear(ones(3, 0), "bf16", codes(0)),
    ),
    (
        "linear_panels: expected epilogue 'none', 'gelu', 'gelu_tanh', 'silu', 'relu', 'tanh', "
        "'sigmoid', 'hardswish', 'relu6', 'add', 'add_relu', 'gelu_add', 'gelu_tanh_add', "
        "'silu_add', 'relu_add', 'tanh_add', 'sigmoid_add', 'hardswish_add', 'relu6_add', "
        "'silu_mul', 'gelu_mul' or 'gelu_tanh_mul', got 'sin'",
        lambda: ops.linear_panels(ones(3, 64), *INT4, epilogue="sin"),
    ),
    (
        "linear_panels: expected panels with 1024 elements, got [512]",
        lambda: ops.linear_panels(ones(3, 64), *INT4, epilogue="silu_mul"),
    ),
    (
        "linear_panels: expected other with epilogue 'add', got None",
        lambda: ops.linear_panels(ones(3, 64), *INT4, epilogue="add"),
    ),
    (
        "linear_panels: expected other None with epilogue 'relu', got [3, 16]",
        lambda: ops.linear_panels(ones(3, 64), *INT4, other=ones(3, 16), epilogue="relu"),
    ),
    (
        "linear_panels: expected other of shape [3, 16], got [1, 16]",
        lambda: ops.linear_panels(ones(3, 64), *INT4, other=ones(1, 16), epilogue="add"),
    ),
    (
        "linear_panels: expected bias of shape [16], got [17]",
        lambda: ops.linear_panels(ones(3, 64), *INT4, ones(17)),
    ),
    (
        "linear_panels: expected activation_dtype 'none' or 'int8', got 'int4'",
        lambda: ops.linear_panels(ones(3, 64), *INT4, activation_dtype="int4"),
    ),
    (
        "linear_panels: expected group_scales with groups of 32, 64, 128 or 256 of 64 in_features, "
        "got 4 groups",
        lambda: linear(ones(3, 64), *INT8[:3], ones(1, 4, 16, dtype=torch.float16)),
    ),
    (
        "linear_panels: expected group_scales of dtype float16 or float32, got bfloat16",
        lambda: linear(ones(3, 64), *INT8[:3], ones(1, 2, 16, dtype=torch.bfloat16)),
    ),
    (
        "linear_panels: expected zero_points of shape [1, 1, 16], got [1, 2, 16]",
        lambda: linear(ones(3, 64), *INT8[:4], torch.zeros(1, 2, 16, dtype=torch.uint8)),
    ),
    (
        "linear_panels: expected channel_scales with 16 elements, got [15]",
        lambda: linear(ones(3, 64), "nf4", codes(512), ones(15)),
    ),
    (
        "linear_panels: expected channel_scales of dtype float32, got bfloat16",
        lambda: linear(ones(3, 64), "nf4", codes(512), ones(16, dtype=torch.bfloat16)),
    ),
    (
        "linear_panels: expected format 'bf16', 'int8', 'int4', 'nf4', 'fp8' or 'fp32', got 'int3'",
        lambda: linear(ones(3, 64), "int3", codes(512), ones(16)),
    ),
    (
        "linear_panels: expected channel_scales a tensor with format 'nf4', got None",
        lambda: linear(ones(3, 64), "nf4", codes(512)),
    ),
    (
        "linear_panels: expected channel_scales None with format 'bf16', got [16]",
        lambda: linear(ones(3, 64), "bf16", codes(2048), ones(16)),
    ),
    (
        "linear_panels: expected zero_points None with format 'nf4', got [1, 1, 16]",
        lambda: linear(ones(3, 64), "nf4", codes(512), ones(16), None, ones(1, 1, 16)),
    ),
    (
        "linear_panels: expected activation_dtype 'none' with format 'fp8', got 'int8'",
        lambda: linear(ones(3, 64), "fp8", codes(1024), ones(16), activation_dtype="int8"),
    ),
    (
        "linear_panels: expected zero_points None with format 'fp8', got [1, 1, 16]",
        lambda: linear(ones(3, 64), "fp8", codes(1024), ones(16), None, ones(1, 1, 16)),
    ),
    (
        "linear_panels: expected activation_dtype 'none' with format 'nf4', got 'int8'",
        lambda: linear(ones(3, 64), "nf4", codes(512), ones(16), activation_dtype="int8"),
    ),
    (
        "interaction: expected dense of shape [batch, dim], got [4]",
        lambda: ops.interaction(ones(4), [ones(4)]),
    ),
    (
        "moe: expected router_indices in [0, 2), got 2",
        lambda: routed(CHOICE + 2),
    ),
    (
        "moe: expected router_indices of dtype int64, got int32",
        lambda: routed(CHOICE.int()),
    ),
    (
        "moe: expected router_indices of shape [2, chosen experts], got [1, 1]",
        lambda: routed(CHOICE[:1]),
    ),
    (
        "moe: expected router_weights of shape [2, 1], got [2, 2]",
        lambda: routed(CHOICE, router_weights=ones(2, 2)),
    ),
    (
        "moe: expected down_panels with a tensor for each of 2 experts, got 1",
        lambda: routed(CHOICE, down_panels=[ones(4, 2048, dtype=torch.uint8)]),
    ),
    (
        "moe: gate_up of expert 0: expected panels with 4096 elements, got [3, 2048]",
        lambda: routed(CHOICE, gate_up_panels=[ones(3, 2048, dtype=torch.uint8)] * 2),
    ),
    (
        "moe: expected epilogue 'silu_mul', 'gelu_mul' or 'gelu_tanh_mul', got 'silu'",
        lambda: routed(CHOICE, epilogue="silu"),
    ),
    (
        "moe: expected gate_up_format 'bf16', 'int8', 'int4', 'nf4', 'fp8' or 'fp32', got 'int3'",
        lambda: routed(CHOICE, gate_up_format="int3"),
    ),
    (
        "mean_squares: expected x with at least 2 dimension(s), got shape [4]",
        lambda: ops.mean_squares(ones(4)),
    ),
    (
        "mean_squares: expected x of dtype float32, bfloat16 or float16 (or float64), got int64",
        lambda: ops.mean_squares(ones(3, 4, dtype=torch.int64)),
    ),
    (
        "optimizer_step: expected rule from 'sgd', 'adam', 'adagrad', 'rmsprop', 'lion', 'lamb', "
        "'lars', 'adafactor', got 'adamw'",
        lambda: step("adamw"),
    ),
    (
        "optimizer_step: expected hyper of lr, beta1, beta2, weight_decay, got 1 numbers",
        lambda: step("lion", 0.1),
    ),
    (
        "optimizer_step: expected gradients with 1 tensors, got 2",
        lambda: step(*SGD, gradients=[ones(4), ones(4)]),
    ),
    (
        "optimizer_step: expected gradients of shape [4], got [5]",
        lambda: step(*SGD, gradients=[ones(5)]),
    ),
    (
        "optimizer_step: expected gradients with the parameter's strides [2, 1], got [1, 2]",
        lambda: step(*SGD, parameters=[ones(2, 2)], gradients=[ones(2, 2).t()]),
    ),
    (
        "optimizer_step: expected parameters without holes between their elements, got strides [2]",
        lambda: step(*SGD, parameters=[ones(8)[::2]]),
    ),
    (
        "optimizer_step: expected gradients of dtype float32, bfloat16 or float16 (or float64), "
        "got int64",
        lambda: step(*SGD, gradients=[whole(1, 2, 3, 4)]),
    ),
    (
        "optimizer_step: expected steps with 1 tensors, got 0",
        lambda: step(*ADAM, states=[ones(4), ones(4)]),
    ),
    (
        "optimizer_step: expected steps with one element, got [2]",
        lambda: step(*ADAM, states=[ones(4), ones(4)], steps=[ones(2)]),
    ),
    (
        "optimizer_step: expected states with at most 1 tensors per parameter, got 2",
        lambda: step(*SGD, states=[ones(4), ones(4)]),
    ),
    (
        "optimizer_step: expected states with every state that the options use, "
        "got 0 per parameter",
        lambda: step(*MOVING_SGD),
    ),
    (
        "optimizer_step: expected states of dtype float32, bfloat16 or float16 (or float64), "
        "got int64",
        lambda: step(*MOVING_SGD, states=[whole(1, 2, 3, 4)]),
    ),
    (
        "optimizer_step: expected scales for states of 8 bits, got none",
        lambda: step(*MOVING_SGD, states=[codes(4)]),
    ),
    (
        "optimizer_step: expected scales with 1 tensors, got 2",
        lambda: step(*MOVING_SGD, states=[codes(4)], scales=[ones(1), ones(1)]),
    ),
    (
        "optimizer_step: expected scales of shape [1], got [2]",
        lambda: step(*MOVING_SGD, states=[codes(4)], scales=[ones(2)]),
    ),
    (
        "optimizer_step: expected parameters of dtype bfloat16, got float32",
        lambda: step(*SGD, low_bits=[torch.zeros(4, dtype=torch.int16)]),
    ),
    (
        "optimizer_step: expected rng_streams with 1 numbers, got 2",
        lambda: step(*SGD, rng_streams=[0, 1]),
    ),
    (
        "optimizer_step: expected found_inf with one element, got [3]",
        lambda: step(*SGD, found_inf=ones(3)),
    ),
    (
        "optimizer_step: expected phase 0 for a rule without sums, got 1",
        lambda: step(*SGD, phase=1, sums=ones(1, 2, dtype=torch.float64)),
    ),
    (
        "optimizer_step: expected sums of shape [1, 2], got [2]",
        lambda: step(
            *("lars", 0.1, 0.0, 0.1, 0.0, 0.0, 0.0),
            phase=1,
            sums=ones(2, dtype=torch.float64),
        ),
    ),
]


@pytest.mark.parametrize(("message", "call"), CASES, ids=[message[:60] for message, _ in CASES])
def test_error_names_argument_and_both_values(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)), torch.no_grad():
        call()


OF_BYTES = {
    "dequantize_per_tensor", "quantize_per_tensor", "quantized_convolution",
    "quantized_embedding_bag", "quantized_gru", "quantized_linear", "quantized_lstm",
    "quantized_merged_embedding_bag",
}  # fmt: skip
"""Whose cases stand in test_quantized_errors.py, test_recurrent.py and test_bags_of_bytes.py."""


def test_every_op_has_an_error_case() -> None:
    named = {re.split("[:,]", message)[0] for message, _ in CASES}
    assert named | OF_BYTES == set(ops.registry()) and not named & OF_BYTES


def test_arguments_on_another_device_are_named() -> None:
    with (
        pytest.raises(Exception, match=r"weight|devices|meta"),
        torch.no_grad(),
    ):
        ops.rms_norm(ones(3, 4), ones(4).to("meta"))
