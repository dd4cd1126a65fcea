"""Our cache inside those of transformers: a layer of a `DynamicCache` over preallocated tensors.

Imported only by what already holds a model of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from .cache import CacheLayer, own_rows, reordered, rounded_capacity

FIRST_ROOM = 256
"""Tokens that a new layer has room for beyond the prompt; then its capacity doubles."""


_KEYS_ONLY = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Layers of transformers' caches that hold nothing but keys and values, or those of another."""


def caches_keys(model: Any) -> bool:
    """Whether all that a model keeps of earlier tokens are keys and values in a `DynamicCache`.

    Others have recurrent states or convolutions in it, or a cache of a class of their own.
    """
    if keys_argument(model) is None or getattr(model, "_is_stateful", False):
        return False
    takes_default = getattr(model, "_supports_default_dynamic_cache", None)
    if takes_default is not None and not takes_default():
        return False
    config = model.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return all(type(layer).__name__ in _KEYS_ONLY for layer in DynamicCache(config=config).layers)


def forward_arguments(model: Any) -> frozenset[str]:
    """Names of the arguments that a model's forward takes; that of PEFT passes all on."""
    base = getattr(model, "get_base_model", None)
    owner = base() if callable(base) else model
    return frozenset(inspect.signature(owner.forward).parameters)


KEYS = ("cache", "past_key_values")
"""What transformers' models call a cache of keys and values: since version 5.24, and before."""
_STATES = (*KEYS, "cache_params", "state")
"""What they call a state that one call returns and the next one takes."""


def keys_argument(model: Any) -> str | None:
    """What a model's forward calls its cache of keys and values; None where it takes none."""
    accepted = forward_arguments(model)
    return next((name for name in KEYS if name in accepted), None)


def state_of(model: Any, output: Any) -> dict[str, Any]:
    """What a call returned for the next one, by the name of its argument, or nothing."""
    accepted = forward_arguments(model)
    for name in _STATES:
        state = getattr(output, name, None) if name in accepted else None
        if state is not None:
            return {name: state}
    return {}


def keeps_tokens(name: str, state: Any) -> bool:
    """Whether a state holds something of each earlier token, which a mask can hide."""
    linear = getattr(state, "is_linear", None)  # for each layer, since transformers 5.24
    return name in KEYS and not (isinstance(linear, list) and linear and all(linear))


_CLASSES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
_UPDATES = [kind.update for kind in _CLASSES]


def is_dynamic(cache: Any) -> bool:
    """Whether a cache is a `DynamicCache` as transformers made it, which changes no keys.

    One of a class of the user's own, or with an `update` of its own, gets to see all keys.
    """
    return (
        type(cache) is DynamicCache
        and "update" not in cache.__dict__
        and not getattr(cache, "offloading", False)
        and [kind.update for kind in _CLASSES] == _UPDATES
    )


def _part(index: int, name: str) -> Any:
    """One of the two plain tensors of a layer; who assigns it makes the layer a plain one."""
    return property(
        lambda layer: layer._plain()[index],
        lambda layer, value: layer._assign(name, value),
    )


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of transformers' caches whose keys and values stay in place.

    It grows by doubling, crops by forgetting, and follows beams through a table of rows instead of
    copying. To others it looks like the layer that it replaces, since masks are made for all layers
    of a cache alike.

    dtype: of the tensors in the cache.
    window: of the layer that it replaces, or None; all tokens are kept, and those are shown which
        that layer would still have.

    Who assigns to `keys` or `values`, or adds keys that have a gradient, gets a layer of
    transformers with these tensors, which is taken over at the next fused step.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, dtype: torch.dtype, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored_dtype = dtype
        self.window = window
        self.is_sliding = window is not None
        self.stored: CacheLayer | None = None
        self.length = 0
        self.beams: Tensor | None = None
        self._shown: tuple[Tensor, Tensor] | None = None

    # transformers' code reads these of a layer as plain tensors.
    keys = _part(0, "keys")
    values = _part(1, "values")

    def _assign(self, name: str, value: Tensor | None) -> None:
        if self.__dict__.get("stored") is None and value is None:
            return  # what a new layer begins with
        self._become_plain()
        setattr(self, name, value)

    def _become_plain(self) -> None:
        """Turns into the layer of transformers that this one replaces."""
        kind: Any = DynamicLayer if self.window is None else DynamicSlidingWindowLayer
        plain = kind() if self.window is None else kind(self.window)
        if self.stored is not None:
            self._settle()
            plain.update(*self.stored.plain(self.length, self.beams, self.dtype))
        self.__dict__ = plain.__dict__
        self.__class__ = type(plain)

    def _plain(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What is shown of keys and values: where they are stored, or copies for `_settle`."""
        if self.stored is None:
            return None, None
        if self._shown is not None:
            return self._shown
        found = self._seen(self.hidden(0))
        if self.beams is not None or self.stored.keys.dtype != self.dtype:
            self._shown = found
        return found

    def _seen(self, hidden: int) -> tuple[Tensor, Tensor]:
        """All but the first `hidden` keys and values, in the model's dtype."""
        assert self.stored is not None
        beams = None if self.beams is None else self.beams[:, hidden:]
        return self.stored.since(hidden).plain(self.length - hidden, beams, self.dtype)

    def _settle(self) -> None:
        """Takes over what was written to copies that were shown."""
        self._leave_inference_mode()
        shown, self._shown = self._shown, None
        if shown is None or self.stored is None:
            return
        hidden = self.length - shown[0].shape[2]
        if all(map(torch.equal, shown, self._seen(hidden))):
            return
        whole = self._seen(0)
        self.beams = None
        keys, values = (
            torch.cat([all_[:, :, :hidden], part], 2)
            for all_, part in zip(whole, shown, strict=True)
        )
        self.stored.write(keys, values, 0)

    def _leave_inference_mode(self) -> None:
        """Copies what torch lets nobody write to outside of inference mode."""
        if self.stored is None or torch.is_inference_mode_enabled():
            return
        if self.stored.keys.is_inference():
            self.stored = self.stored.grown(self.stored.capacity, self.length)
        if self.beams is not None and self.beams.is_inference():
            self.beams = self.beams.clone()

    def hidden(self, new: int) -> int:
        """How many of the first tokens the layer that this replaces does not have any more.

        new: of the tokens, how many it was given last, with which it shows all that they can see.
        """
        return 0 if self.window is None else max(self.length - new - self.window + 1, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.room(key_states.shape, key_states.dtype)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> CacheLayer:
        """Returns tensors that have room for more keys of `shape` [batch, kv_heads, n, head_dim].

        dtype: that of the model's keys, which transformers' code gets to see.
        """
        self._settle()
        batch, heads, new, dim = shape
        self.dtype, self.device = dtype, torch.device("cpu")
        self.is_initialized = True
        needed = self.length + new
        if self.stored is None:
            capacity = rounded_capacity(needed + FIRST_ROOM)
            self.stored = CacheLayer.empty(batch, heads, capacity, dim, self.stored_dtype)
        elif needed > self.stored.capacity:
            capacity = rounded_capacity(max(needed, 2 * self.stored.capacity))
            if self.beams is not None:
                more = self.beams.new_zeros(batch, capacity - self.stored.capacity)
                self.beams = torch.cat([self.beams, more], 1)
            self.stored = self.stored.grown(capacity, self.length)
        if self.beams is not None:
            own_rows(self.beams, self.length, needed)
        return self.stored

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Takes over what another kind of layer has stored."""
        self.room(keys.shape, keys.dtype).write(keys, values, 0)
        self.length = keys.shape[-2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._become_plain()
            return self.update(key_states, value_states)
        stored = self.room(key_states.shape, key_states.dtype)
        stored.write(key_states, value_states, self.length)
        self.length += key_states.shape[-2]
        return self._seen(self.hidden(key_states.shape[-2]))

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        # A number of queries, or in older releases their positions.
        queries = query.shape[0] if isinstance(query, Tensor) else query
        hidden = self.hidden(0)
        return self.length + queries - hidden, hidden

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        self.length = 0
        self.beams = self._shown = None

    def crop(self, tokens: int) -> None:
        """tokens: below zero, how many to forget; above, how many to keep (older releases)."""
        self._settle()
        if tokens > 0:
            self._refuse_as_replaced(tokens)
        if tokens < 0:
            self.length = max(0, self.length + tokens)
        elif tokens > 0:
            self.length = min(self.length, tokens)

    def _refuse_as_replaced(self, tokens: int) -> None:
        """Raises what the layer that this one replaces would of a number of tokens to keep."""
        if self.window is None:
            DynamicLayer().crop(tokens)  # type: ignore[no-untyped-call]
            return
        replaced: Any = DynamicSlidingWindowLayer(self.window)
        replaced.cumulative_length = self.length
        replaced.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._settle()
        if self.stored is not None:
            self.beams = reordered(self.beams, beam_idx, self.stored.capacity)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stored is not None:
            batch = self.stored.keys.shape[0]
            self.batch_select_indices(torch.arange(batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._settle()
        if self.stored is None:
            return
        if self.beams is None:
            self.stored = self.stored.rows(indices)
            return
        keys, values = self.stored.plain(self.length, self.beams, self.dtype)
        self.stored, self.beams, length = None, None, self.length
        self.length = 0
        self.adopt(keys[indices], values[indices])
        assert self.length == length


def takes(cache: Any, index: int) -> bool:
    """Whether layer `index` of a cache of transformers is one of ours, or can be replaced by one.

    A layer of another kind (static, quantized, offloaded) cannot, nor can one that somebody has
    taken tokens out of, nor one of keys that gradients are asked for (a prefix that is trained).
    """
    if not is_dynamic(cache):
        return False
    if index >= len(cache.layers):
        return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    layer: Any = cache.layers[index]
    if type(layer) is PreallocatedLayer:
        return True
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        return False
    length = layer.get_seq_length()
    keys, values = layer.keys, layer.values
    if not length:
        return True
    if keys is None or values is None or not keys.shape[-2] == values.shape[-2] == length:
        return False
    return not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))


def layer_of(cache: Any, index: int, dtype: torch.dtype) -> PreallocatedLayer:
    """Returns layer `index` of a cache that `takes` it as one of ours.

    An ordinary dynamic layer is replaced in the cache, with all that it holds.
    """
    layers = cache.layers
    while len(layers) <= index:
        layers.append(PreallocatedLayer(dtype))
    layer = layers[index]
    if type(layer) is PreallocatedLayer:
        return layer
    dynamic: Any = layer
    ours = PreallocatedLayer(dtype, getattr(dynamic, "sliding_window", None))
    if dynamic.get_seq_length():
        ours.adopt(dynamic.keys, dynamic.values)
    layers[index] = ours
    return ours
