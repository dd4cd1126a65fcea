"""Forwards that `llm.optimize` puts into modules: decoder layers, MLPs, norms.

Each runs the module's own forward for calls that it does not know, and wherever the modules are no
longer those that it was made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..graph.forward import Forward
from . import recipes
from .cache import CacheLayer, rounded_capacity
from .layer import DecoderLayer, Mlp, Norm
from .observing import named_arguments
from .plan import LayerPlan
from .standing import Standing

_DTYPES = (torch.float32, torch.bfloat16)


class LayerForward(Forward):
    """The forward of a decoder layer as its fused record.

    Calls with gradients, with arguments that it does not know, or with a cache that is none of ours
    run the layer's own forward; so does every call while its modules are others (see `Standing`).
    """

    def __init__(
        self,
        module: nn.Module,
        plan: LayerPlan,
        layer: DecoderLayer,
        cache_dtype: torch.dtype,
        rotated: Tensor | None = None,
    ) -> None:
        super().__init__(module)
        self.plan = plan
        self.layer = layer
        self.cache_dtype = cache_dtype
        self.rotated = rotated
        self.standing = Standing(module, layer)
        assert plan.cache_argument is not None
        self._cache_argument = plan.cache_argument
        self.known = {*recipes.KNOWN_ARGUMENTS, plan.cache_argument}
        self.known |= {name for name in plan.arguments if "position_embeddings" in name}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or is_dynamo_compiling():
            return self.own(*args, **kwargs)
        arguments = self._understood(hidden, args, kwargs)
        # Last, since weights are packed again for it.
        if arguments is None or not self.standing.allows(hidden):
            return self.own(*args, **kwargs)
        result = self._step(hidden, arguments)
        if self.plan.results:
            return (result, *[None] * (self.plan.results - 1))
        return result

    def _understood(
        self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments of a call that the fused layer knows, by name, or None."""
        if hidden.dim() != 3 or hidden.dtype not in _DTYPES or hidden.device.type != "cpu":
            return None
        arguments = named_arguments(self.module, args, kwargs) if len(args) > 1 else kwargs
        for name, value in arguments.items():
            if name not in self.known and value is not None and value is not False:
                return None
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
            return None
        cache = arguments.get(self._cache_argument)
        if cache is not None:
            from .transformers_cache import takes

            if not takes(cache, self.plan.index):
                return None
        return arguments

    def _step(self, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        plan = self.plan
        batch, length, _ = hidden.shape
        cos, sin = plan.cos_sin(arguments)
        mask, cache = arguments.get("attention_mask"), arguments.get(self._cache_argument)
        if cache is None:
            capacity = rounded_capacity(length)
            stored = CacheLayer.empty(
                batch, plan.kv_heads, capacity, plan.head_dim, self.cache_dtype
            )
            return self.layer.step(hidden, stored, 0, cos, sin, mask)
        from .transformers_cache import layer_of

        ours = layer_of(cache, plan.index, self.cache_dtype)
        stored = ours.room((batch, plan.kv_heads, length, plan.head_dim), hidden.dtype)
        start, beams = ours.length, ours.beams
        before = ours.hidden(0)
        if mask is not None and before and mask.shape[-1] == start + length - before:
            # The mask is for the keys that a layer of transformers would still have.
            stored, start = stored.since(before), start - before
            beams = None if beams is None else beams[:, before:]
        windowed = self._windowed(mask, start + length, length)
        result = self.layer.step(hidden, stored, start, cos, sin, mask, beams, windowed)
        ours.length += length
        return result

    def _windowed(self, mask: Tensor | None, keys: int, length: int) -> bool:
        """Whether a token's mask lets through no key from before the layer's window."""
        window = self.plan.window
        if mask is None or window is None or length != 1 or mask.dtype != torch.bool:
            return False
        return keys > window and not bool(mask[..., : keys - window].any())


class RecordForward(Forward):
    """The forward of a gated MLP or of a norm as its record."""

    def __init__(self, module: nn.Module, record: Mlp | Norm) -> None:
        super().__init__(module)
        self.record = record
        self.standing = Standing(module, record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # More arguments may change what it computes: a gate, as in Mamba 2's norm.
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and self.record.takes(x) and self.standing.allows(x):
            return self.record(x)
        return self.own(*args, **kwargs)
