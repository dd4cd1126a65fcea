"""Tries a plan on numbers: the layer as it is and the fused one, on the same random values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graph.agreement import difference
from .cache import CacheLayer, rounded_capacity
from .matching import Unmatched, plans
from .observing import LayerCalls
from .plan import Plan, Products

ALLOWED = 1e-5
"""Largest difference of a layer's output, as a fraction of its largest value, in float32."""


class Differs(Exception):
    """No plan gives the layer's own answers; gap: by how much the best one differs."""

    def __init__(self, gap: float) -> None:
        super().__init__(f"differs from every recipe, by {gap:.1e} of its largest output at best")
        self.gap = gap


def choose(calls: LayerCalls, config: Any, likely: Plan | None) -> tuple[Plan, float]:
    """Returns the plan that gives a layer's own answers, and how far they lie apart.

    The layer runs as a float32 copy with random norms and biases: what is one or zero in a fresh
    model hides nothing. likely: the plan of the layer before, whose choices are tried first.
    Raises Unmatched or Differs.
    """
    layer = wide_copy(calls.module)
    prompt, token = wide(calls.prompt), wide(calls.token)
    found = [*plans(layer, calls.prompt, config, calls.position, calls.results)]
    if likely is not None:
        found.sort(key=lambda plan: _distance(plan, likely))
    expected = None
    best = float("inf")
    for plan in found:
        if plan.cache_argument is None:
            raise Unmatched("it is called without a cache")
        hidden = _hidden(layer, plan, calls)
        if expected is None:
            expected = original(layer, plan, hidden, prompt, token)
        gap = difference(expected, fused(layer, plan, hidden, prompt, token))
        if gap <= ALLOWED:
            return plan, gap
        best = min(best, gap)
    raise Differs(best)


def _distance(plan: Plan, other: Plan) -> int:
    names = ("wiring", "layout", "interleaved", "softcap", "rotary_argument", "scale")
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


def _hidden(layer: nn.Module, plan: Plan, calls: LayerCalls) -> tuple[Tensor, Tensor]:
    """Random hidden states of the prompt and of one token."""
    weight = layer.get_submodule(plan.output.paths[0]).get_parameter("weight")
    width = weight.shape[1 if plan.output.transposed else 0]
    length = _length(calls)
    generator = torch.Generator().manual_seed(calls.position)
    return (
        torch.randn(1, length, width, generator=generator),
        torch.randn(1, 1, width, generator=generator),
    )


def _length(calls: LayerCalls) -> int:
    for value in pytree.tree_leaves(calls.prompt):
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype == torch.int64:
            return value.shape[1]  # position_ids
    for value in pytree.tree_leaves(calls.prompt):
        if isinstance(value, Tensor) and value.dim() == 3:
            return value.shape[1]  # cos
    raise Unmatched("its arguments do not tell the number of tokens")


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
        with torch.no_grad():
            result = layer(states, **changed)
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
        cos, sin = cos_sin(plan, arguments)
        with torch.no_grad():
            answers.append(record.step(states, cache, start, cos, sin))
    return answers[0], answers[1]


def cos_sin(plan: Plan, arguments: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """What a call's arguments say of the rotation, [batch, n, rotary] each."""
    if plan.rotary_argument is None:
        return None, None
    cos, sin = arguments[plan.rotary_argument]
    return cos, sin
