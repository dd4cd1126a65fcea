"""Tries a plan on numbers: the layer as it is and the fused one, on the same random values."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graph.agreement import difference
from .cache import CacheLayer, rounded_capacity
from .layer import FusedLayer
from .matching import Unmatched, layer_index, plans, window_of
from .observing import LayerCalls
from .plan import Plan, Products

ALLOWED = 1e-5
"""Largest difference of a layer's output, as a fraction of its largest value, in float32."""


ALLOWED_PACKED = {None: 0.02, 8: 0.05, 4: 0.5}
"""The same of a packed layer's answer to the sample prompt, by the bits of its codes."""


class Differs(Exception):
    """No plan gives the layer's own answers; gap: by how much the best one differs."""

    def __init__(self, gap: float) -> None:
        super().__init__(f"differs from every recipe, by {gap:.1e} of its largest output at best")
        self.gap = gap


class Chooser:
    """Finds the plans of a model's layers, each structure tried once in float32."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._known: dict[Any, Plan | Unmatched | Differs] = {}
        self._likely: Plan | None = None

    def choose(self, calls: LayerCalls) -> tuple[Plan, float]:
        """Returns the plan of a layer, and how far its answers lie apart (0 if it was not tried).

        A layer of the same modules, settings and shapes as one before computes the same with other
        weights, and has the same plan. Raises Unmatched or Differs.
        """
        same = signature(calls)
        known = self._known.get(same)
        if isinstance(known, (Unmatched, Differs)):
            raise known
        if known is not None:
            part = calls.module.get_submodule(known.attention)
            index = layer_index(part, calls.position)
            window = window_of(part, self.config, calls.position)
            return replace(known, index=index, window=window), 0.0
        try:
            plan, gap = choose(calls, self.config, self._likely)
        except (Unmatched, Differs) as reason:
            self._known[same] = reason
            raise
        self._known[same] = self._likely = plan
        return plan, gap


def signature(calls: LayerCalls) -> tuple[Any, ...]:
    """All of a layer that decides what it computes, but its weights and its number."""
    found: list[Any] = [calls.results, tuple(calls.prompt)]
    for path, module in calls.module.named_modules():
        settings = tuple(
            (name, value if isinstance(value, _PLAIN) else id(value))
            for name, value in sorted(vars(module).items())
            if name not in _NUMBERS and (isinstance(value, _PLAIN) or callable(value))
        )
        shapes = tuple((name, p.shape) for name, p in module._parameters.items() if p is not None)
        hooks = [id(h) for h in (*module._forward_hooks.values(), *module._forward_pre_hooks)]
        found.append((path, type(module), settings, shapes, tuple(hooks)))
    return tuple(found)


_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = ("layer_idx", "layer_id", "layer_number")


def choose(calls: LayerCalls, config: Any, likely: Plan | None) -> tuple[Plan, float]:
    """Returns the plan that gives a layer's own answers, and how far they lie apart.

    The layer runs as a float32 copy with random norms and biases: what is one or zero in a fresh
    model hides nothing. likely: a plan whose choices are tried first. Raises Unmatched or Differs.
    """
    layer = wide_copy(calls.module)
    prompt, token = wide(calls.prompt), wide(calls.token)
    found = [*plans(layer, calls.prompt, config, calls.position, calls.results)]
    if likely is not None:
        found.sort(key=lambda plan: _distance(plan, likely))
    if found and found[0].cache_argument is None:
        raise Unmatched("it is called without a cache")
    shape = calls.hidden.shape
    generator = torch.Generator().manual_seed(calls.position)
    hidden = (
        torch.randn(shape, generator=generator),
        torch.randn(shape[0], 1, shape[2], generator=generator),
    )
    expected = None
    best = float("inf")
    for plan in found:
        if expected is None:
            expected = original(layer, plan, hidden, prompt, token)
        gap = difference(expected, fused(layer, plan, hidden, prompt, token))
        if gap <= ALLOWED:
            return plan, gap
        best = min(best, gap)
    raise Differs(best)


def _distance(plan: Plan, other: Plan) -> int:
    names = ("wiring", "layout", "interleaved", "spread", "softcap", "rotary_argument", "scale")
    return sum(getattr(plan, name) != getattr(other, name) for name in names)


def wide_copy(layer: nn.Module) -> nn.Module:
    """A float32 copy of a layer that shows what it does.

    Vectors (norms, biases) get noise, matrices are scaled so that they double what they are
    given: the ones, zeros and small weights of a fresh model would hide a wrong recipe.
    """
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        values = parameter.detach().float()
        if parameter.dim() == 1:
            values = values + 0.2 * torch.randn(values.shape, generator=generator)
        else:
            values = 2 * values / (values.std() * values.shape[-1] ** 0.5).clamp_min(1e-30)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in layer.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(layer, memo)


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, numbers in float32."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
        return value

    result: dict[str, Any] = pytree.tree_map(cast, arguments)
    return result


def original(
    layer: nn.Module,
    plan: Plan,
    hidden: tuple[Tensor, Tensor],
    prompt: dict[str, Any],
    token: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The layer's own answers to the prompt and to the token behind it."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    answers = []
    for states, arguments in zip(hidden, (prompt, token), strict=True):
        changed = {**arguments, str(plan.cache_argument): cache}
        try:
            with torch.no_grad():
                result = layer(states, **changed)
        except Exception as error:  # any refusal by a user's layer only means that it is left
            line = (str(error).splitlines() or [""])[0]
            reason = f"it does not run on random values ({type(error).__name__}: {line})"
            raise Unmatched(reason) from error
        answers.append(result[0] if isinstance(result, tuple) else result)
    return answers[0], answers[1]


def fused(
    layer: nn.Module,
    plan: Plan,
    hidden: tuple[Tensor, Tensor],
    prompt: dict[str, Any],
    token: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The fused layer's answers to the same, without masks: causal, in the plan's window."""
    record = plan.build(layer, Products())
    length = hidden[0].shape[1]
    cache = CacheLayer.empty(
        1, plan.kv_heads, rounded_capacity(length + 1), plan.head_dim, torch.float32
    )
    answers = []
    for states, arguments, start in zip(hidden, (prompt, token), (0, length), strict=True):
        cos, sin = plan.cos_sin(arguments)
        with torch.no_grad():
            answers.append(record.step(states, cache, start, cos, sin))
    return answers[0], answers[1]


def packed_gap(
    fused: FusedLayer, plan: Plan, calls: LayerCalls, dtype: torch.dtype, cache_dtype: torch.dtype
) -> float:
    """How far a packed layer's answer to the sample prompt is from what the layer itself gave.

    As sizes of vectors: the difference by the answer.
    """
    batch, length, _ = calls.hidden.shape
    capacity = rounded_capacity(length)
    cache = CacheLayer.empty(batch, plan.kv_heads, capacity, plan.head_dim, cache_dtype)
    cos, sin = plan.cos_sin(calls.prompt)
    if cos is not None and sin is not None:
        cos, sin = cos.to(dtype), sin.to(dtype)
    with torch.no_grad():
        found = fused.step(calls.hidden.to(dtype), cache, 0, cos, sin).double()
    expected = calls.output.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
