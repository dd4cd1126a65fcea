"""`llm.optimize`: a language model of transformers whose decoder layers are a few ops each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ..core.modes import with_normal_tensors
from ..graph.agreement import FUSED_LAYER
from ..ops.panels import PanelWeight
from ..quantization.configs import WeightConfig
from ..quantization.layers import output_head
from ..rewriting.changes import ChangeLog
from ..rewriting.copies import copied
from ..rewriting.driver import run_passes
from ..rewriting.predecessor import LLM_OPTIMIZE, leads_on
from .arguments import (
    cache_dtype_of,
    check_head,
    check_memory,
    check_model,
    check_weights,
    head_config_of,
    text_config,
    weight_config,
)
from .cache import DTYPES
from .observing import decoder_layers, move, observe
from .packing import Packer
from .passes import PASSES, LanguageModelContext
from .report import LanguageModelReport
from .weights import stored_form

_Model = TypeVar("_Model", bound=nn.Module)


@leads_on("llm.optimize", LLM_OPTIMIZE)
@with_normal_tensors
def optimize(
    model: _Model,
    dtype: torch.dtype | None = torch.bfloat16,
    weights: str | WeightConfig | None = None,
    kv_cache: str | None = None,
    *,
    group_size: int | None = 128,
    activation_dtype: str | None = None,
    head: str | None = "weights",
    inplace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> _Model:
    """Return a language model of transformers with packed weights and fused decoder layers.

    model: a causal language model of transformers, in evaluation mode, on the CPU. The result has
        its class, its configuration and its `generate`. Decoder layers are recognized by their
        structure, not by the model's name, and checked against their own code within the tolerances
        of docs/numerics.md. A layer that is not recognized keeps its code, with its linear layers
        packed.
    dtype: torch.bfloat16 or torch.float32, of activations and of weights that are not quantized.
        None keeps the model's.
    weights: None, "int8" or "fp8" (a scale for each output), "int4", "nf4", or a configuration of
        oxytorch.quantization. Weights that are already quantized stay as they are.
    kv_cache: "bf16", "fp32" or "int8", the format of keys and values. None is that of `dtype`.
    group_size: consecutive inputs that share a scale, for int4 and nf4: 32, 64, 128, 256 or None.
    activation_dtype: "int8" rounds the activations that int8 and int4 weights multiply, which makes
        prefill faster.
    head: format of the output head: "weights" (that of the other weights), "bf16", "int8", "int4",
        "nf4" or "fp8". An embedding that shares the head's weight stays plain.
    inplace: change `model` itself and free its weights on the way. Otherwise a copy is returned,
        and both are in memory.
    progress: called with the number of finished layers and of all layers.

    state_dict() and save_pretrained() give plain weights under the same names; load_state_dict()
    packs again. Parameters keep requires_grad, so call the model under torch.no_grad() or
    torch.inference_mode() (`generate` does). Calls with gradients, and with arguments or caches
    that the fused layers do not support, run the layers' own code. Weights of fewer bits get the
    gradients of their rounded values.

    Raises TypeError, ValueError or MemoryError before anything is changed if an argument does not
    fit, a weight is not finite, or memory does not suffice. After an interrupt, or an error in
    `progress`, the model is restored; but with inplace=True and less free memory than twice what
    both forms take, weights that were replaced already keep their packed values.
    """
    config = weight_config(weights, group_size, activation_dtype)
    dtype = check_model(model, dtype)
    head_config = head_config_of(head, config, group_size, activation_dtype)
    cache_dtype = cache_dtype_of(kv_cache, dtype)
    text = text_config(model)
    layers = decoder_layers(model)
    observed = observe(model, layers, text)
    if any(calls.prompt for calls in layers):
        # What a prompt of tokens does not reach reads images or sound, and runs as before.
        layers = [calls for calls in layers if calls.prompt]
    check_head(model)
    check_weights(layers, config)
    has_room = check_memory(model, layers, config, dtype, inplace)
    result = model if inplace else copied(model, "llm.optimize")
    if not inplace:
        move(layers, observed.rotations, model, result)
    report = _report(model, dtype, cache_dtype, len(layers))
    log = ChangeLog(report)
    context = LanguageModelContext(
        result,
        log,
        report,
        packer=Packer(log, result, dtype, config, not inplace, has_room),
        head_config=head_config,
        cache_dtype=cache_dtype,
        layers=layers,
        observed=observed,
        text_config=text,
        original=None if inplace else model,
        progress=progress,
    )
    run_passes(context, PASSES)
    log.settle()
    stored = [p for layer in layers for p in layer.module.parameters() if p.dim() > 1]
    report.weights = _formats(stored, dtype)
    report.head = _formats([*output_head(result).parameters()][:1], dtype)  # type: ignore[union-attr]
    return result


def _report(
    model: nn.Module, dtype: torch.dtype, cache_dtype: torch.dtype, layers: int
) -> LanguageModelReport:
    return LanguageModelReport(
        type(model).__name__,
        str(dtype).removeprefix("torch."),
        ["llm.optimize"],
        kv_cache=next(name for name, known in DTYPES.items() if known == cache_dtype),
        layers=layers,
        allowed=FUSED_LAYER,
    )


def _formats(parameters: list[nn.Parameter], dtype: torch.dtype) -> str:
    """How most of some weights are stored."""
    sizes: dict[str, int] = {}
    for parameter in parameters:
        stored = stored_form(parameter)
        name = str(dtype).removeprefix("torch.")
        if isinstance(stored, PanelWeight) and stored.format != "bf16":
            group = f" in groups of {stored.group_size}" if stored.group_size else ""
            rounded = ", int8 activations" if stored.activation_dtype else ""
            name = stored.format + group + rounded
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name], default="")
