"""Language models of `transformers` on the CPU: at the memory's speed, without another format.

`optimize` makes a model faster and leaves it its class; `KVCache` holds what tokens leave behind.
"""

from __future__ import annotations

from .cache import KVCache
from .layer import FusedLayer
from .model import FusedModel
from .optimize import fused_model, optimize

__all__ = ["FusedLayer", "FusedModel", "KVCache", "fused_model", "optimize"]
