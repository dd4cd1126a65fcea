"""`torch.jit.trace` and `freeze` of models that `optimize` returned, after `install`.

The predecessor fused the graphs of TorchScript in all of a process, and so its programs trace and
freeze what they have optimized. Here a module that was traced of such a model is given to
`oxytorch.optimize` where it is frozen, with the inputs that it was traced with.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from ..optimize import optimize
from ..rewriting.changes import log_of

is_enabled = True
"""What `enable_onednn_fusion` sets."""
_traced: dict[int, tuple[weakref.ref[Any], tuple[Any, ...]]] = {}


def tracing(trace: Any) -> Any:
    """`torch.jit.trace`, which also notes inputs; under autocast without its cache of weights."""

    @functools.wraps(trace)
    def noting(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(cache and not torch.is_autocast_enabled("cpu"))
        try:
            traced = trace(func, example_inputs, *args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cache)
        if isinstance(func, nn.Module) and log_of(func) is not None and example_inputs is not None:
            inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
            key = id(traced)
            gone = weakref.ref(traced, lambda _: _traced.pop(key, None))
            _traced[key] = gone, inputs
        return traced

    return noting


def freezing(freeze: Any) -> Any:
    """`torch.jit.freeze`, which optimizes what was traced of an optimized model."""

    @functools.wraps(freeze)
    def optimizing(mod: Any, *args: Any, **kwargs: Any) -> Any:
        _, inputs = _traced.get(id(mod), (None, None))
        if inputs is None or args or kwargs or not is_enabled:
            return freeze(mod, *args, **kwargs)
        return optimize(mod, sample_input=inputs)

    return optimizing
