"""The predecessor's quantization settings, and what they are in oxytorch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from ..quantization import (
    Float8Weight,
    Int4Weight,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    Int8Weight,
    NF4Weight,
)
from ..quantization.configs import WeightConfig
from .errors import not_served


class WoqWeightDtype(enum.IntEnum):
    """Formats of weights."""

    INT8 = 1
    INT4 = 2
    NF4 = 3
    FP8 = 4


class WoqLowpMode(enum.IntEnum):
    """The dtype that products are computed in; NONE: that of the activations."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


class WoqActQuantMode(enum.IntEnum):
    """What activations share a scale, with `WoqLowpMode.INT8`."""

    NONE = -1
    PER_TENSOR = 0
    PER_IC_BLOCK = 1
    PER_BATCH = 2
    PER_BATCH_IC_BLOCK = 3
    PER_TENSOR_SYM = 4
    PER_IC_BLOCK_SYM = 5
    PER_BATCH_SYM = 6
    PER_BATCH_IC_BLOCK_SYM = 7


class WoqWeightQScheme(enum.IntEnum):
    """Whether weights have a zero point."""

    UNDEFINED = 0
    ASYMMETRIC = 1
    SYMMETRIC = 2


_WEIGHTS: dict[tuple[WoqWeightDtype, bool], type[WeightConfig]] = {
    (WoqWeightDtype.INT8, False): Int8Weight,
    (WoqWeightDtype.INT4, False): Int4Weight,
    (WoqWeightDtype.NF4, False): NF4Weight,
    (WoqWeightDtype.FP8, False): Float8Weight,
    (WoqWeightDtype.INT8, True): Int8DynamicActivationInt8Weight,
    (WoqWeightDtype.INT4, True): Int8DynamicActivationInt4Weight,
}
"""By the format, and whether activations are rounded to 8 bits."""


@dataclass(frozen=True)
class WeightOnlyMapping:
    """What `get_weight_only_quant_qconfig_mapping` returns; config: of `oxytorch.quantize_`."""

    config: WeightConfig


def get_weight_only_quant_qconfig_mapping(
    *,
    weight_dtype: int = WoqWeightDtype.INT8,
    lowp_mode: int = WoqLowpMode.NONE,
    act_quant_mode: int = WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM,
    group_size: int = -1,
    weight_qscheme: int = WoqWeightQScheme.UNDEFINED,
) -> WeightOnlyMapping:
    """Settings for weights of 4 or 8 bits.

    lowp_mode: INT8 also rounds activations to 8 bits, row by row, whatever `act_quant_mode` says;
        the others let products take the dtype of the activations.
    group_size: inputs that share a scale: 32, 64, 128, 256, or -1 for all.
    """
    format, mode = WoqWeightDtype(weight_dtype), WoqLowpMode(lowp_mode)
    WoqActQuantMode(act_quant_mode)
    scheme = WoqWeightQScheme(weight_qscheme)
    is_dynamic = mode == WoqLowpMode.INT8
    kind = _WEIGHTS.get((format, is_dynamic))
    if kind is None:
        raise not_served(
            f"lowp_mode INT8 with {format.name} weights", "use WoqLowpMode.NONE, or INT4 weights"
        )
    # Their rule where nothing is said. Formats of floating-point numbers have no zero point.
    is_symmetric = format in (WoqWeightDtype.NF4, WoqWeightDtype.FP8) or (
        format == WoqWeightDtype.INT8 and is_dynamic
    )
    if scheme != WoqWeightQScheme.UNDEFINED:
        is_symmetric = scheme == WoqWeightQScheme.SYMMETRIC
    return WeightOnlyMapping(kind(None if group_size == -1 else group_size, is_symmetric))


@dataclass(frozen=True)
class SmoothQuantMapping:
    """What `get_smooth_quant_qconfig_mapping` returns."""

    config: Int8StaticActivationInt8Weight


def get_smooth_quant_qconfig_mapping(
    alpha: float = 0.5,
    act_observer: Any = None,
    act_ic_observer: Any = None,
    wei_observer: Any = None,
    wei_ic_observer: Any = None,
    share_weight_observers: bool = True,
) -> SmoothQuantMapping:
    """Settings for static quantization with smoothed activations.

    alpha: accepted; oxytorch searches it for each group of layers.
    share_weight_observers: accepted; layers that share an input always share its factors.
    """
    given = [act_observer, act_ic_observer, wei_observer, wei_ic_observer]
    if any(observer is not None for observer in given):
        raise not_served(
            "an observer of get_smooth_quant_qconfig_mapping",
            "use Int8StaticActivationInt8Weight(smooth=True, observer=...) of "
            "oxytorch.quantization",
        )
    return SmoothQuantMapping(
        Int8StaticActivationInt8Weight(smooth=True, only_faster=False, observer="minmax")
    )


_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "MovingAverageMinMaxObserver": "moving_average",
    "HistogramObserver": "mse",
}


def settings_of(
    configure: Any,
) -> WeightConfig | Int8StaticActivationInt8Weight:
    """What a `QConfig`, a `QConfigMapping` or one of the above is in oxytorch."""
    if isinstance(configure, WeightOnlyMapping | SmoothQuantMapping):
        return configure.config
    qconfig = getattr(configure, "global_qconfig", configure)
    activation = getattr(qconfig, "activation", None)
    if activation is None:
        raise TypeError(
            "prepare: expected configure to be a QConfig or a QConfigMapping with a global one, "
            f"got a {type(configure).__name__}"
        )
    observer = activation()
    # The older spelling of a dynamic observer, of which torch keeps nothing.
    given = getattr(getattr(activation, "p", None), "keywords", {})
    if getattr(observer, "is_dynamic", False) or "compute_dtype" in given:
        return Int8DynamicActivationInt8Weight(only_faster=False)
    kind = _OBSERVERS.get(type(observer).__name__)
    if kind is None:
        raise not_served(
            f"the observer {type(observer).__name__}",
            f"use one of {', '.join(_OBSERVERS)}, or PlaceholderObserver with is_dynamic=True",
        )
    symmetric = observer.dtype == torch.qint8 or observer.qscheme == torch.per_tensor_symmetric
    return Int8StaticActivationInt8Weight(symmetric, kind, only_faster=False)


def _static_qconfig() -> Any:
    quantization = torch.ao.quantization
    return quantization.QConfig(  # type: ignore[no-untyped-call]
        activation=quantization.HistogramObserver.with_args(reduce_range=False),
        weight=_weight_observer(),
    )


def _dynamic_qconfig() -> Any:
    quantization = torch.ao.quantization
    return quantization.QConfig(  # type: ignore[no-untyped-call]
        activation=quantization.PlaceholderObserver.with_args(dtype=torch.float, is_dynamic=True),
        weight=_weight_observer(),
    )


def _weight_observer() -> Any:
    return torch.ao.quantization.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )


def __getattr__(name: str) -> Any:
    makers = {"static": _static_qconfig, "dynamic": _dynamic_qconfig}
    words = name.split("_")
    if words[0] != "default" or len(words) < 3 or words[1] not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    qconfig = makers[words[1]]()
    if name.endswith("_mapping"):
        return torch.ao.quantization.QConfigMapping().set_global(qconfig)
    return qconfig
