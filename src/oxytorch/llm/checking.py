"""Tries a plan on numbers: the layer as it is and the fused one, on the same random values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.interruption import pass_on_interruption
from ..core.packed import PackedTensor
from ..graph.agreement import FUSED_LAYER, difference
from ..ops.panels.product import in_255_steps
from .cache import CacheLayer, rounded_capacity
from .layer import DecoderLayer, RoutedMlp
from .matching import Unmatched, layer_index, plans, window_of
from .observing import LayerCalls
from .plan import LayerPlan, Products
from .weights import rounded_activations


class Differs(Exception):
    """A layer's own outputs are not those of any plan, or of its packed form; gap: by how much."""

    def __init__(self, gap: float, reason: str = "its outputs differ from every recipe's") -> None:
        super().__init__(reason)
        self.gap = gap


class Chooser:
    """Finds the plans of a model's layers, each structure tried once in float32."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._known: dict[Any, LayerPlan | Unmatched | Differs] = {}
        self._likely: LayerPlan | None = None

    def choose(self, calls: LayerCalls) -> tuple[LayerPlan, float]:
        """Returns the plan of a layer, and how far its outputs lie apart (0 if it was not tried).

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
    """What decides what a layer computes: modules, settings, shapes, not weights or index."""
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


def choose(calls: LayerCalls, config: Any, likely: LayerPlan | None) -> tuple[LayerPlan, float]:
    """Returns the plan that gives a layer's own outputs, and how far they lie apart.

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
    runs = [
        (torch.randn(shape, generator=generator, device="cpu"), prompt),
        (torch.randn(shape[0], 1, shape[2], generator=generator, device="cpu"), token),
    ]
    expected = None
    best = float("inf")
    for plan in found:
        if expected is None:
            expected = original(layer, plan, runs)
        gap = difference(expected, fused(plan.build(layer, Products()), plan, runs))
        if gap <= FUSED_LAYER:
            return plan, gap
        best = min(best, gap)
    raise Differs(best)


def _distance(plan: LayerPlan, other: LayerPlan) -> int:
    names = (
        "block_order",
        "layout",
        "interleaved",
        "repeat_interleave",
        "softcap",
        "rotary_argument",
        "scale",
    )
    return sum(getattr(plan, name) != getattr(other, name) for name in names)


def wide_copy(layer: nn.Module) -> nn.Module:
    """A float32 copy of a layer that shows what it does.

    Vectors (norms, biases) get noise, matrices are scaled so that they double what they are
    given: the ones, zeros and small weights of a fresh model would hide a wrong recipe.
    """
    generator = torch.Generator().manual_seed(0)

    def shown(parameter: Tensor) -> Tensor:
        values: Tensor = parameter.detach().float()
        if parameter.dim() == 1:
            return values + 0.2 * torch.randn(values.shape, generator=generator, device="cpu")
        scale: Tensor = (values.std() * values.shape[-1] ** 0.5).clamp_min(1e-30)
        return 2 * values / scale

    return _copy(layer, shown)


def plain_copy(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a layer with the plain values of its parameters in another dtype."""

    def plain(parameter: Tensor) -> Tensor:
        values = parameter.values() if isinstance(parameter, PackedTensor) else parameter.detach()
        return values.to(dtype)

    return _copy(layer, plain)


def _rounding_copy(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A plain copy whose products round what they are given, where the packed ones do.

    Of stacked experts, which are one module, the first product does.
    """
    copied = plain_copy(layer, dtype)
    for path, module in layer.named_modules():
        if rounded_activations(module.parameters(recurse=False)) is not None:
            copied.get_submodule(path).register_forward_pre_hook(_round_given)
    return copied


def _round_given(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (in_255_steps(args[0].float()).to(args[0].dtype), *args[1:])


def _copy(layer: nn.Module, values: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {id(buffer): buffer for buffer in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(values(parameter), requires_grad=False)
    return copy.deepcopy(layer, memo)


def wide(arguments: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same arguments, numbers in float32 or another dtype."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    result: dict[str, Any] = pytree.tree_map(cast, arguments)
    return result


Runs = list[tuple[Tensor, dict[str, Any]]]
"""Calls of a layer, one behind the other: hidden states [batch, n, width] and other arguments."""


def original(layer: nn.Module, plan: LayerPlan, runs: Runs) -> tuple[Tensor, ...]:
    """The layer's own outputs."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    outputs = []
    for states, arguments in runs:
        changed = {**arguments, str(plan.cache_argument): cache}
        try:
            with torch.no_grad():
                result = layer(states, **changed)
        except Exception as error:  # any refusal by a user's layer only means that it is left
            pass_on_interruption(error)
            line = (str(error).splitlines() or [""])[0]
            reason = f"it does not run on random values ({type(error).__name__}: {line})"
            raise Unmatched(reason) from error
        outputs.append(result[0] if isinstance(result, tuple) else result)
    return tuple(outputs)


def fused(
    record: DecoderLayer, plan: LayerPlan, runs: Runs, cache_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """The fused layer's outputs to the same, without masks: causal, in the plan's window."""
    length = sum(states.shape[1] for states, _ in runs)
    capacity = rounded_capacity(length)
    batch = runs[0][0].shape[0]
    cache = CacheLayer.empty(batch, plan.kv_heads, capacity, plan.head_dim, cache_dtype)
    outputs = []
    start = 0
    for states, arguments in runs:
        cos, sin = plan.cos_sin(arguments)
        with torch.no_grad():
            outputs.append(record.step(states, cache, start, cos, sin))
        start += states.shape[1]
    return tuple(outputs)


def packed_gap(
    record: DecoderLayer,
    plan: LayerPlan,
    calls: LayerCalls,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> float:
    """How far a packed layer's output to the sample prompt is from what the layer itself gave.

    As sizes of vectors: the difference by the output.
    """
    found = fused(record, plan, _sample(calls, dtype), cache_dtype)
    return _distance_of(found, (calls.output,))


def added_share(calls: LayerCalls) -> float:
    """The norm of what a layer adds to its input, as a fraction of the norm of its output."""
    return _distance_of((calls.hidden,), (calls.output,))


def gap_of_own_weights(
    record: DecoderLayer, plan: LayerPlan, calls: LayerCalls, dtype: torch.dtype, enough: float
) -> tuple[float, float]:
    """How far a packed layer's output is from that of its own code in float32, with the same
    rounded weights and activations, and how far that of its own code in `dtype` is from it.

    enough: a distance that needs no comparison with that of its own code, which is then 0.
    Where experts are routed, float32 takes those that the packed layer chose: scores that are
    nearly alike are in another order in each dtype. Rounding of the cache is left out.
    """
    layer = calls.module
    noted = record
    if isinstance(record.mlp, RoutedMlp):
        noted = replace(record, mlp=_Choice(record.mlp))  # type: ignore[arg-type]
    found = fused(noted, plan, _sample(calls, dtype), dtype)
    exact = _rounding_copy(layer, torch.float32)
    expected = own_expected = original(exact, plan, _sample(calls, torch.float32))
    if isinstance(noted.mlp, _Choice):
        again = plan.build(exact, Products())
        assert isinstance(again.mlp, RoutedMlp)
        again.mlp = _Choice(again.mlp, noted.mlp.indices)  # type: ignore[assignment]
        expected = fused(again, plan, _sample(calls, torch.float32))
    gap = _distance_of(found, expected)
    if gap <= enough:
        return gap, 0.0
    own = original(_rounding_copy(layer, dtype), plan, _sample(calls, dtype))
    return gap, _distance_of(own, own_expected)


def _sample(calls: LayerCalls, dtype: torch.dtype) -> Runs:
    return [(calls.hidden.to(dtype), wide(calls.prompt, dtype))]


def _distance_of(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    ours, theirs = found[0].double(), expected[0].double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


class _Choice:
    """Routed experts that notes which ones are chosen for each token, or takes those given."""

    def __init__(self, mlp: RoutedMlp, indices: Tensor | None = None) -> None:
        self.mlp = mlp
        self.indices = indices

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weights, self.indices = self.mlp.choose(x, self.indices)
        return self.mlp.mixed(x, residual, weights, self.indices)
