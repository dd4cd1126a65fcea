"""The predecessor's `llm.optimize`."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .. import llm
from ..quantization.configs import WeightConfig
from ..quantization.layers import output_head
from .autocast import compute_in_own_dtype
from .errors import not_served
from .front import optimize as optimize_any
from .qconfigs import WeightOnlyMapping


def optimize(
    model: Any,
    optimizer: Any = None,
    dtype: torch.dtype = torch.float,
    inplace: bool = False,
    device: str = "cpu",
    quantization_config: Any = None,
    qconfig_summary_file: str | None = None,
    low_precision_checkpoint: Any = None,
    sample_inputs: Any = None,
    deployment_mode: bool = True,
    cache_weight_for_large_batch: bool = False,
) -> Any:
    """Return `oxytorch.llm.optimize(model)`.

    A model in training mode, or with an optimizer, is returned as it is, with the optimizer and a
    warning. Models that are no causal language models go to `optimize`.

    dtype: torch.float32 or torch.bfloat16. The result computes in it, within `torch.autocast` too.
    quantization_config: what `get_weight_only_quant_qconfig_mapping` returned.
    sample_inputs, deployment_mode, cache_weight_for_large_batch: change nothing; nothing is traced,
        and one packed weight serves all batch sizes.
    """
    if device != "cpu":
        raise not_served(
            f"llm.optimize(device={device!r})", "leave it out: language models run on the CPU"
        )
    if optimizer is not None or model.training:
        warnings.warn(
            "llm.optimize is for inference: the model is returned as it is; to train it use "
            "optimize(model, optimizer=optimizer)",
            stacklevel=2,
        )
        return model, optimizer
    _check_served(dtype, qconfig_summary_file, low_precision_checkpoint)
    weights = _weights_of(quantization_config)
    is_causal = hasattr(model, "config") and hasattr(model, "generate")
    if not is_causal or output_head(model) is None:
        if weights is not None:
            raise not_served(
                f"llm.optimize of a {type(model).__name__} with quantization_config",
                "use oxytorch.quantize_(model, config)",
            )
        return optimize_any(model, dtype, inplace=inplace)
    result = llm.optimize(model, dtype, weights, inplace=inplace)
    return compute_in_own_dtype(result, None if dtype == torch.float32 else dtype)


def _check_served(
    dtype: torch.dtype, qconfig_summary_file: str | None, low_precision_checkpoint: Any
) -> None:
    if qconfig_summary_file is not None:
        raise not_served(
            "llm.optimize(qconfig_summary_file=...)",
            "use oxytorch.llm.optimize(model, weights='int8', activation_dtype='int8'), which "
            "needs no file",
        )
    if low_precision_checkpoint is not None:
        raise not_served(
            "llm.optimize(low_precision_checkpoint=...)",
            "use model = oxytorch.load_quantized(directory), then oxytorch.llm.optimize(model)",
        )
    if dtype == torch.float16:
        raise not_served("llm.optimize(dtype=torch.float16)", "use dtype=torch.bfloat16")


def _weights_of(quantization_config: Any) -> WeightConfig | None:
    if quantization_config is None:
        return None
    if not isinstance(quantization_config, WeightOnlyMapping):
        raise not_served(
            "llm.optimize with this quantization_config",
            "pass get_weight_only_quant_qconfig_mapping(...), or use "
            "oxytorch.llm.optimize(model, weights='int8', activation_dtype='int8')",
        )
    return quantization_config.config


def optimize_transformers(*args: Any, **kwargs: Any) -> Any:
    """The old name of `optimize`, with a warning."""
    warnings.warn(
        "optimize_transformers is deprecated; use llm.optimize",
        DeprecationWarning,
        stacklevel=2,
    )
    return optimize(*args, **kwargs)
