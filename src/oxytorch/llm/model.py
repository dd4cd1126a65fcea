"""The record of a whole language model, made of its layers' records and compared with the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..graph.agreement import LOGITS, LOGITS_MULTIPLE, difference
from ..quantization.layers import output_head
from .forwards import LayerForward
from .layer import Norm
from .matching import norm_of
from .observing import Rotations
from .record import FusedModel, HeadProduct, RotaryTable, sample_logits
from .samples import sample_length, sample_tokens
from .standing import Standing
from .weights import rounded_activations

_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the length of the prompt."""

_OFFSETS = (0, 2)
"""Rows of a table of positions that come before position 0 (OPT has 2)."""


def fuse(
    model: Any, forwards: list[LayerForward], rotations: Rotations, config: Any, dtype: torch.dtype
) -> tuple[FusedModel | None, str]:
    """Returns the record of a whole model whose layers are fused, or None and why there is none.

    The record's logits are compared with those of the model's own code, for a prompt and one more
    token.
    """
    tables, rotary, reason = _tables(forwards, rotations, dtype)
    if reason:
        return None, reason
    head = output_head(model)
    assert head is not None
    base = FusedModel(
        model.get_input_embeddings(),
        [forward.layer for forward in forwards],
        tables,
        rotary,
        HeadProduct(head),
        forwards[0].cache_dtype,
        dtype,
    )
    allowed = LOGITS[dtype] * LOGITS_MULTIPLE[rounded_activations(model.parameters())]
    tokens = sample_tokens(model, sample_length(config) + 1, batch=2)
    seen = _Seen(model, forwards, tokens)
    if not _choose_embedding(model, base, config, seen, tokens[:, :-1]):
        return None, "it is not known what goes into its first layer"
    if not _choose_logits(model, base, forwards, config, seen, allowed):
        return None, "it is not known what comes behind its last layer"
    gap = difference(seen.logits, sample_logits(base, tokens))
    if not gap <= allowed:
        return None, f"its logits differ by {gap:.1e} of the largest, allowed {allowed:.1e}"
    base.standing = ModelStanding(model, base, [forward.standing for forward in forwards])
    return base, ""


class ModelStanding(Standing):
    """Whether a record still stands for a whole model; layers: the same of its layers."""

    def __init__(self, owner: nn.Module, record: FusedModel, layers: list[Standing]) -> None:
        super().__init__(owner, record, skips_owner=True)
        self.layers = layers

    def holds(self) -> bool:
        # What was written to an embedding reaches a head that has its weight too, and back.
        assert isinstance(self.record.head, HeadProduct)
        forward = self.record.head.module.__dict__.get("forward")
        renew = getattr(forward, "renew", None)
        if renew is not None:
            renew()
        return super().holds()

    def _follows_buffers(self) -> bool:
        return True  # tables of angles are made again, and layers look at theirs

    def _reads_the_weights(self) -> bool:
        return all(layer.holds() for layer in self.layers)  # the rest is read where it is

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layers": self.layers}


class _Seen:
    """What a model's own code gives for a prompt and one more token.

    first, last: of the prompt, what goes into the first layer and comes out of the last one.
    logits: of both.
    """

    def __init__(self, model: Any, forwards: list[LayerForward], tokens: Tensor) -> None:
        from .transformers_cache import state_of

        states: list[Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        def behind(module: nn.Module, args: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        layers = forwards[0].module, forwards[-1].module
        with (
            layers[0].register_forward_pre_hook(before, with_kwargs=True),
            layers[1].register_forward_hook(behind),
            torch.no_grad(),
        ):
            prompt = model(input_ids=tokens[:, :-1], use_cache=True)
            token = model(input_ids=tokens[:, -1:], **state_of(model, prompt))
        self.first, self.last = states[:2]
        self.logits = prompt.logits, token.logits


def _choose_embedding(
    model: nn.Module, base: FusedModel, config: Any, seen: _Seen, tokens: Tensor
) -> bool:
    width = base.embedding._parameters["weight"].shape[1]  # type: ignore[union-attr]
    if width != seen.first.shape[-1]:
        return False
    multiplier = getattr(config, "embedding_multiplier", None)
    scales = (None, float(getattr(config, "hidden_size", 1)) ** 0.5, multiplier)
    for positions in _positions(model, base.embedding, tokens.shape[1] + 1):
        for scale in scales:
            base.positions, base.scale = positions, scale
            with torch.no_grad():
                found = base.embedded(tokens, 0)
            if found.shape == seen.first.shape and (
                difference(seen.first, found) <= LOGITS[base.dtype]
            ):
                return True
    return False


def _choose_logits(
    model: nn.Module,
    base: FusedModel,
    forwards: list[LayerForward],
    config: Any,
    seen: _Seen,
    allowed: float,
) -> bool:
    width = seen.last.shape[-1]
    assert isinstance(base.head, HeadProduct)
    head = base.head.module._parameters["weight"]
    assert head is not None
    if width not in head.shape:
        return False  # something between the last layer and the head changes it
    for norm in _last_norms(model, forwards, width):
        for softcap, divisor in _logit_forms(config):
            base.norm, base.softcap, base.divisor = norm, softcap, divisor
            with torch.no_grad():
                found = base.logits(seen.last)
            if difference(seen.logits[0], found) <= allowed:
                return True
    return False


def _tables(
    forwards: list[LayerForward], rotations: Rotations, dtype: torch.dtype
) -> tuple[list[RotaryTable], list[int | None], str]:
    tables: list[RotaryTable] = []
    rotary: list[int | None] = []
    known: dict[int, int] = {}
    for forward in forwards:
        if forward.rotated is None:
            rotary.append(None)
            continue
        found = [i for i, (_, cos) in enumerate(rotations) if cos is forward.rotated]
        if not found:
            return [], [], "it is not known what makes the angles of its rotary embedding"
        if found[0] not in known:
            known[found[0]] = len(tables)
            rotation = rotations[found[0]][0]
            kind = getattr(rotation.module, "rope_type", "")
            kinds = kind.values() if isinstance(kind, dict) else (kind,)
            changing = any(word in str(k) for k in kinds for word in _CHANGING)
            tables.append(RotaryTable(rotation, dtype, changing, forward.plan.repeat_interleave))
        rotary.append(known[found[0]])
    return tables, rotary, ""


def _last_norms(model: nn.Module, forwards: list[LayerForward], width: int) -> list[Norm | None]:
    """Norms of a width beside the list of layers, as candidates for the last one."""
    inside = {part for forward in forwards for part in forward.module.modules()}
    found: list[Norm | None] = []
    for owner in model.modules():
        for name, module in owner.named_children():
            if module not in inside and not [*module.children()]:
                plan = norm_of(owner, name)
                if plan is not None and module.get_parameter("weight").numel() == width:
                    found.append(plan.build(owner))
    return [*found[::-1], None]


def _positions(
    model: nn.Module, embedding: nn.Module, length: int
) -> list[tuple[nn.Module, int] | None]:
    """Tables of learned positions that reach as far as `length`, as candidates."""
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module is not embedding
        and module.embedding_dim == embedding.embedding_dim
    ]
    return [
        None,
        *[
            (table, before)
            for table in tables
            for before in _OFFSETS
            if table.num_embeddings >= length + before
        ],
    ]


def _logit_forms(config: Any) -> list[tuple[float | None, float | None]]:
    """What may be done to logits: (softcap, divisor)."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scaling = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    divisor = scaling if scaling else (1 / factor if factor else None)
    return [(softcap, divisor)] + ([(None, None)] if softcap or divisor else [])
