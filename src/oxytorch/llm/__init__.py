"""Language models of `transformers` on the CPU: at the memory's speed, without another format.

`optimize` makes a model faster in place of its class; `KVCache` holds what tokens leave behind.
"""

from __future__ import annotations

from .cache import KVCache
from .layer import FusedLayer

__all__ = ["FusedLayer", "KVCache"]
