"""Language models of `transformers` on the CPU: at the memory's speed, without another format.

`optimize` makes a model faster in place of its class; `KVCache` holds what tokens leave behind;
`generate` writes text with the least work between two tokens, `stream` token by token.
"""

from __future__ import annotations

from .cache import KVCache
from .generation import generate, stream
from .layer import FusedLayer

__all__ = ["FusedLayer", "KVCache", "generate", "stream"]
