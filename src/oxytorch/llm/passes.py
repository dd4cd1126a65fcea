"""The passes of `llm.optimize`, in their order: each a function of a `LanguageModelContext`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.packed import PackedTensor
from ..graph.agreement import (
    COARSE_LAYER,
    PACKED_LAYER,
    ROUNDED_LAYER,
    SAME_WEIGHTS,
    SAME_WEIGHTS_MULTIPLE,
)
from ..ops.panels import PanelWeight
from ..ops.panels.formats import FORMATS
from ..quantization.configs import WeightConfig
from ..quantization.layers import output_head
from ..rewriting.changes import AttributeSet, ChangeLog
from ..rewriting.copies import Separation
from . import checking
from .forwards import LayerForward, RecordForward
from .layer import DecoderLayer, Mlp
from .matching import Unmatched
from .model import fuse
from .observing import LayerCalls, ObservedLayers
from .packing import Packer
from .parts import improve_parts, set_norm_forward, stored_transposed
from .plan import LayerPlan
from .record import FUSED, fused_model
from .report import LanguageModelReport
from .tied import TiedHeadForward
from .weights import stored_form


@dataclass
class LanguageModelContext:
    """One `llm.optimize` call in progress.

    head_config: how the output head is quantized, or None.
    layers: the decoder layers, with the calls that were seen.
    observed: what was seen beside them.
    text_config: the configuration of the model's language part.
    original: the model that this one is a copy of, or None.
    progress: see `optimize`.
    forwards: of the layers that were fused.
    """

    model: nn.Module
    log: ChangeLog
    report: LanguageModelReport
    packer: Packer
    head_config: WeightConfig | None
    cache_dtype: torch.dtype
    layers: list[LayerCalls]
    observed: ObservedLayers
    text_config: Any
    original: nn.Module | None
    progress: Callable[[int, int], None] | None
    forwards: list[LayerForward] = field(default_factory=list)


def rewrite_layers(context: LanguageModelContext) -> None:
    """Fuse the decoder layers, one after the other; improve the parts of those that are left."""
    chooser = checking.Chooser(context.text_config)
    log, report, problem = context.log, context.report, context.observed.problem
    for done, calls in enumerate(context.layers):
        if context.progress is not None:
            context.progress(done, len(context.layers))
        begin = len(log.changes)
        try:
            if problem or not calls.token:
                raise Unmatched(problem or "a token does not reach it")
            plan, gap = chooser.choose(calls)
            _fuse(context, calls, plan, gap)
        except (Unmatched, checking.Differs) as reason:
            context.packer.give_back(begin)
            if isinstance(reason, checking.Differs):
                report.differing.append(reason.gap)
            _leave(context, calls, str(reason))
        else:
            report.fused += 1
            report.difference = max(report.difference, gap)
        if not context.packer.keeps:
            log.settle(begin)
    if context.progress is not None:
        context.progress(len(context.layers), len(context.layers))


def _fuse(context: LanguageModelContext, calls: LayerCalls, plan: LayerPlan, tried: float) -> None:
    layer, packer, log = calls.module, context.packer, context.log
    for product in plan.products():
        packer.order(layer, product)
    packed = {path for product in plan.products() for path in product.paths}
    experts = plan.experts.stacked if plan.experts else None
    packer.cast_rest(layer, packed, set(experts or ()))
    fused = plan.build(layer, packer)
    heads = [norm for norm in (plan.query_norm, plan.key_norm) if norm is not None]
    for norm in [*heads, *(norm for _, norm in plan.norms)]:
        set_norm_forward(layer, norm, packer)
    if isinstance(fused.mlp, Mlp) and fused.mlp.up.gated and plan.mlp:
        owner = layer.get_submodule(plan.mlp)
        log.set_forward(owner, RecordForward(owner, fused.mlp))
    rotated = None
    if plan.rotary_argument is not None:
        rotated = calls.prompt[plan.rotary_argument][0]
    _check_packed(context, calls, plan, fused, is_first=tried > 0)
    forward = LayerForward(layer, plan, fused, context.cache_dtype, rotated)
    log.set_forward(layer, forward)
    context.forwards.append(forward)
    log.applied("llm", calls.path, f"{type(layer).__name__}: {plan.block_order}")


def _check_packed(
    context: LanguageModelContext,
    calls: LayerCalls,
    plan: LayerPlan,
    fused: DecoderLayer,
    is_first: bool,
) -> None:
    """Raises Differs where packed weights do not give the layer's outputs.

    is_first: of the layers of its structure. It is looked at closely where rounding to few bits
    would hide a mistake in packing them.
    """
    dtype, config = context.packer.dtype, context.packer.config
    gap = checking.packed_gap(fused, plan, calls, dtype, context.cache_dtype)
    is_near = gap <= _expected_gap(context, calls, plan)
    if not is_near or (is_first and config is not None):
        _check_rounding(calls, plan, fused, dtype)
    context.report.packed_difference = max(context.report.packed_difference, gap)


def _expected_gap(context: LanguageModelContext, calls: LayerCalls, plan: LayerPlan) -> float:
    """How far rounding usually takes a layer's output, as a fraction of its norm."""
    config = context.packer.config
    if config is None:
        return PACKED_LAYER
    width, eight_bits = calls.hidden.shape[-1], FORMATS["int8"]
    errors = [FORMATS[config.format].rounding_error(config.group_size or width)]
    if config.activation_dtype is not None:
        errors.append(eight_bits.rounding_error(width))
    if not context.cache_dtype.is_floating_point:
        errors.append(eight_bits.rounding_error(plan.head_dim))
    of_weights = ROUNDED_LAYER * math.hypot(*errors) * checking.added_share(calls)
    return of_weights + torch.finfo(context.packer.dtype).eps / 2


def _check_rounding(
    calls: LayerCalls, plan: LayerPlan, fused: DecoderLayer, dtype: torch.dtype
) -> None:
    """Raises Differs where a layer errs more than its own code does with the same weights."""
    stored = [stored_form(parameter) for parameter in calls.module.parameters()]
    panels = [weight for weight in stored if isinstance(weight, PanelWeight)]
    is_quantized = any(weight.format != "bf16" for weight in panels)
    least = SAME_WEIGHTS[is_quantized] * checking.added_share(calls)
    gap, own = checking.gap_of_own_weights(fused, plan, calls, dtype, least)
    allowed = min(max(least, SAME_WEIGHTS_MULTIPLE * own), COARSE_LAYER)
    if not gap <= allowed:
        raise checking.Differs(
            gap,
            f"packed, it differs from its own code by {gap:.1e} of the output's norm, allowed "
            f"{allowed:.1e}",
        )


def _leave(context: LanguageModelContext, calls: LayerCalls, reason: str) -> None:
    context.log.skipped("llm", calls.path, f"{type(calls.module).__name__}: {reason}")
    for path, detail in improve_parts(calls.module, context.packer):
        context.log.applied("llm", f"{calls.path}.{path}", detail)


def pack_head(context: LanguageModelContext) -> None:
    """Pack the output head, unless it is packed already."""
    head = output_head(context.model)
    weight = None if head is None else head._parameters.get("weight")
    if head is None or weight is None or isinstance(weight, PackedTensor):
        return
    form = stored_transposed(head)
    if form is None:
        return
    packer = copy.copy(context.packer)
    packer.config = context.head_config
    packer.head(head, form, context.model)
    if isinstance(head._parameters["weight"], PackedTensor):
        path = next(path for path, module in context.model.named_modules() if module is head)
        context.log.applied("llm", path, "output head packed")


def cast_rest(context: LanguageModelContext) -> None:
    """Give what is neither in the head nor in a layer its dtype, in memory of its own."""
    model: Any = context.model
    context.packer.cast_rest(model, set(), set())
    weight = model.get_input_embeddings()._parameters.get("weight")
    context.packer.cast_buffers(model, 0 if weight is None else weight.shape[-1])
    if context.original is not None:
        Separation(context.original)(model)


def record_model(context: LanguageModelContext) -> None:
    """Make the record of the whole model that `llm.generate` steps through."""
    forwards, notes = context.forwards, context.report.notes
    if len(forwards) != len(context.layers) or not forwards:
        notes.append("llm.generate goes through transformers' code: see above")
        return
    rotations, dtype = context.observed.rotations, context.packer.dtype
    found, reason = fuse(context.model, forwards, rotations, context.text_config, dtype)
    if found is None:
        notes.append(f"llm.generate goes through transformers' code: {reason}")
        return
    last = found.norm
    if last is not None and "forward" not in last.module.__dict__:
        # Both ways of generating round alike.
        context.log.set_forward(last.module, RecordForward(last.module, last))
    context.log.changes.append(AttributeSet(context.model, FUSED, found))
    context.report.whole = True


def note_modules(context: LanguageModelContext) -> None:
    """Take the modules as they are now as what their new forwards were made of."""
    fused = fused_model(context.model)
    standings = [] if fused is None else [fused.standing]
    for forward in context.log.forwards():
        standings.append(getattr(forward, "standing", None))
        if isinstance(forward, TiedHeadForward):
            forward.plain = forward.owner._parameters["weight"]
            forward.renew()
    for standing in standings:
        if standing is not None:
            standing.note()


PASSES = (rewrite_layers, pack_head, cast_rest, record_model, note_modules)
