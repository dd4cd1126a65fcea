"""`llm.optimize`: a language model of transformers whose decoder layers are a few ops each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.packed import PackedTensor
from ..graph.agreement import FUSED_LAYER, PACKED_LAYER, PACKED_MULTIPLE
from ..ops.panels import PanelWeight
from ..ops.panels.formats import CODES
from ..quantization.configs import WeightConfig
from ..quantization.layers import output_head
from ..rewriting.changes import AttributeSet, ChangeLog, rewriting
from ..rewriting.copies import Separation, copied
from . import checking
from .arguments import (
    cache_dtype_of,
    check_head,
    check_memory,
    check_model,
    check_weights,
    text_config,
    weight_config,
)
from .cache import DTYPES
from .forwards import LayerForward, MlpForward, NormForward
from .layer import DecoderLayer, Mlp
from .matching import Unmatched
from .model import FusedModel, fuse
from .observing import LayerCalls, Rotations, decoder_layers, move, observe
from .packing import Packer
from .parts import improve_parts, set_norm_forward, stored_transposed
from .plan import LayerPlan
from .report import LanguageModelReport
from .tied import TiedHeadForward
from .weights import stored_form

_Model = TypeVar("_Model", bound=nn.Module)


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
    weights: None, "int8" (a scale for each output), "int4", "nf4", or a configuration of
        oxytorch.quantization. Weights that are already quantized stay as they are.
    kv_cache: "bf16", "fp32" or "int8", the format of keys and values. None is that of `dtype`.
    group_size: consecutive inputs that share a scale, for int4 and nf4: 32, 64, 128, 256 or None.
    activation_dtype: "int8" rounds the activations that int8 and int4 weights multiply, which makes
        prefill faster.
    head: format of the output head: "weights" (that of the other weights), "bf16", "int8", "int4"
        or "nf4". An embedding that shares the head's weight stays plain.
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
    head_config = config
    if head in (None, "bf16"):
        head_config = None
    elif head != "weights":
        if head not in CODES:
            names = ", ".join(map(repr, ("weights", "bf16", *CODES)))
            raise ValueError(f"llm.optimize: expected head {names}, got {head!r}")
        head_config = weight_config(head, group_size, activation_dtype)
    cache_dtype = cache_dtype_of(kv_cache, dtype)
    text = text_config(model)
    layers = decoder_layers(model)
    observed = observe(model, layers, text)
    rotations = observed.rotations
    if any(calls.prompt for calls in layers):
        # What a prompt of tokens does not reach reads images or sound, and runs as before.
        layers = [calls for calls in layers if calls.prompt]
    check_head(model)
    check_weights(layers, config)
    has_room = check_memory(model, layers, config, dtype, inplace)
    result = model if inplace else copied(model, "llm.optimize")
    if not inplace:
        move(layers, rotations, model, result)
    report = LanguageModelReport(
        type(model).__name__,
        str(dtype).removeprefix("torch."),
        ["llm.optimize"],
        kv_cache=next(name for name, known in DTYPES.items() if known == cache_dtype),
        layers=len(layers),
        allowed=FUSED_LAYER,
    )
    with rewriting(result, report) as log:
        work = _Work(result, log, dtype, config, cache_dtype, not inplace, has_room)
        work.layers(layers, text, observed.problem, progress)
        work.rest(head_config)
        if not inplace:
            Separation(model)(result)  # buffers
        work.whole(layers, rotations, text)
        work.note()
    log.settle()
    stored = [p for layer in layers for p in layer.module.parameters() if p.dim() > 1]
    report.weights = _formats(stored, dtype)
    report.head = _formats([*output_head(result).parameters()][:1], dtype)  # type: ignore[union-attr]
    return result


class _Work:
    """One optimization in progress."""

    def __init__(
        self,
        model: nn.Module,
        log: ChangeLog,
        dtype: torch.dtype,
        config: WeightConfig | None,
        cache_dtype: torch.dtype,
        separate: bool,
        keeps: bool,
    ) -> None:
        self.model = model
        self.log = log
        self.report: LanguageModelReport = log.report  # type: ignore[assignment]
        self.dtype = dtype
        self.packer = Packer(log, dtype, config, separate, keeps)
        self.cache_dtype = cache_dtype
        self.forwards: list[LayerForward] = []

    def layers(
        self,
        layers: list[LayerCalls],
        config: Any,
        problem: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Fuses the decoder layers, one after the other; packs the linear layers of the others.

        problem: why none of them can be fused, or "".
        """
        chooser = checking.Chooser(config)
        for done, calls in enumerate(layers):
            if progress is not None:
                progress(done, len(layers))
            begin = len(self.log.changes)
            try:
                if problem or not calls.token:
                    raise Unmatched(problem or "a token does not reach it")
                plan, gap = chooser.choose(calls)
                self._fuse(calls, plan, gap)
            except (Unmatched, checking.Differs) as reason:
                self.log.undo(begin)  # parameters are the user's again
                if isinstance(reason, checking.Differs):
                    self.report.differing.append(reason.gap)
                self._leave(calls, str(reason))
            else:
                self.report.fused += 1
                self.report.difference = max(self.report.difference, gap)
            if not self.packer.keeps:
                self.log.settle(begin)
        if progress is not None:
            progress(len(layers), len(layers))

    def _fuse(self, calls: LayerCalls, plan: LayerPlan, tried: float) -> None:
        layer = calls.module
        for product in plan.products():
            self.packer.order(layer, product)
        packed = {path for product in plan.products() for path in product.paths}
        experts = plan.experts.stacked if plan.experts else None
        self.packer.cast_rest(layer, packed, set(experts or ()))
        fused = plan.build(layer, self.packer)
        heads = [norm for norm in (plan.query_norm, plan.key_norm) if norm is not None]
        for norm in [*heads, *(norm for _, norm in plan.norms)]:
            set_norm_forward(layer, norm, self.packer)
        if isinstance(fused.mlp, Mlp) and fused.mlp.up.gated and plan.mlp:
            owner = layer.get_submodule(plan.mlp)
            self.log.set_forward(owner, MlpForward(owner, fused.mlp))
        rotated = None
        if plan.rotary_argument is not None:
            rotated = calls.prompt[plan.rotary_argument][0]
        self._check_packed(calls, plan, fused, is_first=tried > 0)
        forward = LayerForward(layer, plan, fused, self.cache_dtype, rotated)
        self.log.set_forward(layer, forward)
        self.forwards.append(forward)
        self.log.applied("llm", calls.path, f"{type(layer).__name__}: {plan.block_order}")

    def _check_packed(
        self, calls: LayerCalls, plan: LayerPlan, fused: DecoderLayer, is_first: bool
    ) -> None:
        """Raises Differs where packed weights do not give the layer's answers.

        is_first: of the layers of its structure. It is looked at closely where rounding to few bits
        would hide a mistake in packing them.
        """
        gap = checking.packed_gap(fused, plan, calls, self.dtype, self.cache_dtype)
        config = self.packer.config
        is_near = gap <= PACKED_LAYER[None if config is None else config.bits]
        if not is_near or (is_first and config is not None):
            self._check_rounding(calls, plan, fused)
        self.report.packed_difference = max(self.report.packed_difference, gap)

    def _check_rounding(self, calls: LayerCalls, plan: LayerPlan, fused: DecoderLayer) -> None:
        """Raises Differs where a layer errs more than its own code does with the same weights."""
        stored = [stored_form(parameter) for parameter in calls.module.parameters()]
        panels = [weight for weight in stored if isinstance(weight, PanelWeight)]
        activation_dtype = next(
            (weight.activation_dtype for weight in panels if weight.activation_dtype), None
        )
        is_quantized = any(weight.format != "bf16" for weight in panels)
        gap, own = checking.gap_of_own_weights(fused, plan, calls, self.dtype)
        least = PACKED_LAYER[8 if is_quantized else None]
        most = PACKED_LAYER[4]
        allowed = min(max(least, PACKED_MULTIPLE[activation_dtype] * own), most)
        if not gap <= allowed:
            raise checking.Differs(
                gap,
                f"packed, it differs from its own code by {gap:.1e} of the answer's size, allowed "
                f"{allowed:.1e}",
            )

    def _leave(self, calls: LayerCalls, reason: str) -> None:
        self.log.skipped("llm", calls.path, f"{type(calls.module).__name__}: {reason}")
        for path, detail in improve_parts(calls.module, self.packer):
            self.log.applied("llm", f"{calls.path}.{path}", detail)

    def rest(self, head_config: WeightConfig | None) -> None:
        """The output head, and the dtype of all that is neither in it nor in a layer."""
        head = output_head(self.model)
        paths = {module: path for path, module in self.model.named_modules()}
        if head is not None and isinstance(head._parameters.get("weight"), nn.Parameter):
            form = stored_transposed(head)
            if form is not None and not isinstance(head._parameters["weight"], PackedTensor):
                self.packer.config = head_config
                self.packer.head(head, form, self.model)
                if isinstance(head._parameters["weight"], PackedTensor):
                    self.log.applied("llm", paths[head], "output head packed")
        self.packer.cast_rest(self.model, set(), set())
        embedding: Any = self.model
        weight = embedding.get_input_embeddings()._parameters.get("weight")
        width = 0 if weight is None else weight.shape[-1]
        self.packer.cast_buffers(self.model, width)

    def whole(self, layers: list[LayerCalls], rotations: Rotations, config: Any) -> None:
        """Makes the record of the whole model that `llm.generate` steps through."""
        if len(self.forwards) != len(layers) or not layers:
            self.report.notes.append("llm.generate goes through transformers' code: see above")
            return
        found, reason = fuse(self.model, self.forwards, rotations, config, self.dtype)
        if found is None:
            self.report.notes.append(f"llm.generate goes through transformers' code: {reason}")
            return
        last = found.norm
        if last is not None and "forward" not in last.module.__dict__:
            # Both ways of generating round alike.
            self.log.set_forward(last.module, NormForward(last.module, last))
        self.log.changes.append(AttributeSet(self.model, FUSED, found))
        self.report.whole = True

    def note(self) -> None:
        """Takes the modules as they are now as what their new forwards were made of."""
        fused = fused_model(self.model)
        standings = [] if fused is None else [fused.standing]
        for forward in self.log.forwards():
            standings.append(getattr(forward, "standing", None))
            if isinstance(forward, TiedHeadForward):
                forward.plain = forward.owner._parameters["weight"]
                forward.renew()
        for standing in standings:
            if standing is not None:
                standing.note()


FUSED = "_oxytorch_fused_model"
"""The attribute that holds the record of the model's whole step."""


def fused_model(model: nn.Module) -> FusedModel | None:
    """Returns what `optimize` found out about the whole of a model, or None."""
    found = model.__dict__.get(FUSED)
    return found if isinstance(found, FusedModel) else None


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


__all__ = ["fused_model", "optimize"]
