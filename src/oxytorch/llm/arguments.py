"""The arguments of `llm.optimize`: what they mean, and whether model and memory fit them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.packed import PackedTensor
from ..ops.panels.formats import CODES
from ..quantization.configs import CONFIGS, WeightConfig
from ..quantization.layers import output_head
from ..rewriting.memory import available_bytes, check_available, nbytes
from ..rewriting.refusals import check_evaluation, check_finite, check_not_optimized
from .cache import DTYPES
from .observing import LayerCalls
from .parts import ROUTERS, stored_transposed


def weight_config(
    weights: str | WeightConfig | None, group_size: int | None, activation_dtype: str | None
) -> WeightConfig | None:
    if activation_dtype not in (None, "int8"):
        raise ValueError(
            f"llm.optimize: expected activation_dtype None or 'int8', got {activation_dtype!r}"
        )
    if weights is None or isinstance(weights, WeightConfig):
        if weights is None and activation_dtype is not None:
            raise ValueError(
                "llm.optimize: expected weights 'int8' or 'int4' with "
                "activation_dtype='int8', got None"
            )
        if weights is not None and activation_dtype not in (None, weights.activation_dtype):
            raise ValueError(
                "llm.optimize: expected activation_dtype=None with a configuration, which has its "
                f"own, got {activation_dtype!r}; give Int8DynamicActivationInt8Weight() or "
                "Int8DynamicActivationInt4Weight() instead"
            )
        return weights
    if weights not in CODES:
        names = ", ".join(map(repr, CODES))
        raise ValueError(f"llm.optimize: expected weights None, {names}, got {weights!r}")
    kind = CONFIGS.get((weights, activation_dtype))
    if kind is None:
        raise ValueError(
            f"llm.optimize: expected activation_dtype=None with {weights}, got {activation_dtype!r}"
        )
    # Formats of 8 bits have a scale for each output.
    return kind() if kind().group_size is None else kind(group_size)


def head_config_of(
    head: str | None, config: WeightConfig | None, group_size: int | None, activation_dtype: Any
) -> WeightConfig | None:
    """How the output head is quantized; config: how the other weights are."""
    if head == "weights":
        return config
    if head in (None, "bf16"):
        return None
    if head not in CODES:
        names = ", ".join(map(repr, ("weights", "bf16", *CODES)))
        raise ValueError(f"llm.optimize: expected head {names}, got {head!r}")
    return weight_config(head, group_size, activation_dtype)


def cache_dtype_of(kv_cache: str | None, dtype: torch.dtype) -> torch.dtype:
    if kv_cache is None:
        return dtype
    if kv_cache not in DTYPES:
        names = ", ".join(map(repr, DTYPES))
        raise ValueError(f"llm.optimize: expected kv_cache None, {names}, got {kv_cache!r}")
    return DTYPES[kv_cache]


def check_model(model: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Looks at the arguments; returns the dtype of the result."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            "llm.optimize: expected a causal language model of transformers, got a "
            f"{type(model).__name__}; oxytorch.optimize takes any module"
        )
    if not hasattr(model, "generate") or output_head(model) is None:
        raise TypeError(
            "llm.optimize: expected a model with an output head (a ...ForCausalLM), got a "
            f"{type(model).__name__}"
        )
    check_not_optimized("llm.optimize", model)
    check_evaluation("llm.optimize", model)
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"llm.optimize: expected {name} on cpu, got {parameter.device}")
    if dtype is None:
        dtype = next(model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"llm.optimize: expected dtype torch.bfloat16 or torch.float32, got {dtype!r}"
        )
    return dtype


def text_config(model: Any) -> Any:
    """The configuration of a model's language part."""
    getter = getattr(model.config, "get_text_config", None)
    return getter() if callable(getter) else model.config


def check_head(model: nn.Module) -> None:
    """Raises ValueError for an output head's weight that is not finite."""
    head = output_head(model)
    weight = None if head is None else head._parameters.get("weight")
    if weight is not None and not isinstance(weight, PackedTensor):
        check_finite("llm.optimize", "the weight of the output head", weight)


def check_weights(layers: list[LayerCalls], config: WeightConfig | None) -> None:
    """Raises ValueError for layers' weights that are not finite or that groups do not divide."""
    for place, module, name in _matrices(layers):
        parameter = module._parameters[name]
        assert parameter is not None
        check_finite("llm.optimize", place, parameter)
        if config is None or not config.group_size or place.split(".")[-2] in ROUTERS:
            continue
        transposed = stored_transposed(module) if name == "weight" else False
        is_packed = name == "weight" or parameter.dim() > 2  # else no layer's: Mamba's `A_log`
        if is_packed and transposed is not None:
            in_features = parameter.shape[0 if transposed else -1]
            config.check_groups("llm.optimize", place, in_features, "group_size=None or int8")


def _matrices(layers: list[LayerCalls]) -> list[tuple[str, nn.Module, str]]:
    """Path, module and name of all plain weights with two dimensions or more."""
    return [
        (f"{calls.path}.{path}.{name}", module, name)
        for calls in layers
        for path, module in calls.module.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() > 1 and not isinstance(parameter, PackedTensor)
    ]


def check_memory(
    model: nn.Module,
    layers: list[LayerCalls],
    config: WeightConfig | None,
    dtype: torch.dtype,
    inplace: bool,
) -> bool:
    """Foresees the most memory beyond the model's own; raises MemoryError if there is less.

    That is the packed weights, less those that are freed on the way, and two float32 copies of a
    layer. Returns whether nothing need be freed on the way: twice of what both take is free.
    """
    bits = 8 * dtype.itemsize if config is None else config.bits + 0.5  # and scales
    plain = [module.get_parameter(name) for _, module, name in _matrices(layers)]
    trial = 2 * 4 * max((_numbers(calls.module) for calls in layers), default=0)
    packed = sum(parameter.numel() for parameter in plain) * bits / 8
    head = output_head(model)
    assert head is not None
    packed += _numbers(head) * bits / 8
    bytes_of_plain = sum(parameter.nbytes for parameter in plain)
    if inplace:
        needed = trial + max(packed - bytes_of_plain, packed / max(len(layers), 1))
        what = f"the packed weights of {type(model).__name__}"
    else:
        needed = trial + packed + nbytes(model) - bytes_of_plain
        what = f"an optimized copy of {type(model).__name__} (inplace=True needs less)"
    check_available("llm.optimize", int(needed), what)
    free = available_bytes()
    return not inplace or (free is not None and free > 2 * (trial + packed + nbytes(model)))


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
