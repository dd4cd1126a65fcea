"""Forwards that `llm.optimize` puts into modules: decoder layers, MLPs, linear layers, norms.

Each runs the module's own forward for calls that it does not know.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from . import recipes
from .cache import CacheLayer, rounded_capacity
from .layer import FusedLayer, Mlp, Norm
from .observing import named_arguments
from .plan import Plan

_DTYPES = (torch.float32, torch.bfloat16)


class LayerForward:
    """The forward of a decoder layer as its fused record.

    Calls with gradients, with arguments that it does not know, of a module in training, with a
    cache that is none of ours, or with hooks on a submodule run the layer's own forward.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        layer: FusedLayer,
        cache_dtype: torch.dtype,
        rotated: Tensor | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.layer = layer
        self.cache_dtype = cache_dtype
        self.rotated = rotated
        self.parts = [part for part in module.modules() if part is not module]
        assert plan.cache_argument is not None
        self.known = {*recipes.KNOWN_ARGUMENTS, plan.cache_argument}
        self.known |= {name for name in plan.arguments if "position_embeddings" in name}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = None
        if args and isinstance(args[0], Tensor):
            result = self._fused(args[0], args, kwargs)
        elif isinstance(kwargs.get("hidden_states"), Tensor):
            result = self._fused(kwargs["hidden_states"], args, kwargs)
        if result is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        if self.plan.results:
            return (result, *[None] * (self.plan.results - 1))
        return result

    def _fused(
        self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        if hidden.dim() != 3 or hidden.dtype not in _DTYPES or hidden.device.type != "cpu":
            return None
        if self.module.training or (hidden.requires_grad and torch.is_grad_enabled()):
            return None
        arguments = named_arguments(self.module, args, kwargs) if len(args) > 1 else kwargs
        for name, value in arguments.items():
            if name not in self.known and value is not None and value is not False:
                return None
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
            return None
        if self._watched():
            return None
        cos, sin = self.plan.cos_sin(arguments)
        return self._step(hidden, arguments.get(self.plan.cache_argument), cos, sin, mask)  # type: ignore[arg-type]

    def _step(
        self, hidden: Tensor, cache: Any, cos: Tensor | None, sin: Tensor | None, mask: Any
    ) -> Tensor | None:
        plan = self.plan
        batch, length, _ = hidden.shape
        if cache is None:
            capacity = rounded_capacity(length)
            stored = CacheLayer.empty(
                batch, plan.kv_heads, capacity, plan.head_dim, self.cache_dtype
            )
            return self.layer.step(hidden, stored, 0, cos, sin, mask)
        from .transformers_cache import layer_of

        ours = layer_of(cache, plan.index, self.cache_dtype)
        if ours is None:
            return None
        stored = ours.room((batch, plan.kv_heads, length, plan.head_dim), hidden.dtype)
        start = ours.length
        windowed = self._windowed(mask, start + length, length)
        result = self.layer.step(hidden, stored, start, cos, sin, mask, ours.beams, windowed)
        ours.length = start + length
        return result

    def _windowed(self, mask: Tensor | None, keys: int, length: int) -> bool:
        """Whether a token's mask lets through no key from before the layer's window."""
        window = self.plan.window
        if mask is None or window is None or length != 1 or mask.dtype != torch.bool:
            return False
        return keys > window and not bool(mask[..., : keys - window].any())

    def _watched(self) -> bool:
        """Whether someone wants to see a submodule's own call: hooks, or a wrapped forward."""
        for part in self.parts:
            if part._forward_hooks or part._forward_pre_hooks:
                if not _only_idle_hooks(part):
                    return True
            elif type(part.__dict__.get("forward")) is FunctionType:
                return True
        return False


def _only_idle_hooks(part: nn.Module) -> bool:
    """Whether a part's hooks are those of transformers that record outputs, and none is wanted."""
    if part._forward_pre_hooks:
        return False
    try:
        from transformers.utils.output_capturing import _active_collector as collector
    except ImportError:  # releases before 5 wrap forwards instead
        return False
    theirs = all(
        getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")
        for hook in part._forward_hooks.values()
    )
    collected = collector.get()  # type: ignore[no-untyped-call]
    return theirs and (collected is None or "attentions" not in collected)


class MlpForward:
    """The forward of a gated MLP whose halves are one product."""

    def __init__(self, module: nn.Module, mlp: Mlp) -> None:
        self.module = module
        self.mlp = mlp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if x is None or x.dtype not in _DTYPES or (x.requires_grad and torch.is_grad_enabled()):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.mlp(x, None)


class NormForward:
    """The forward of a norm."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.module = module
        self.norm = norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.device.type != "cpu":
            # More arguments may change the norm: a gate, as in Mamba 2.
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.norm(x)
