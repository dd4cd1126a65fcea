"""Language models of `transformers` on the CPU: at the memory's speed, without another format.

`optimize` makes a model faster and leaves it its class; `KVCache` holds what tokens leave behind;
`generate` writes text with the least work between two tokens, `stream` token by token;
`perplexity` says how well a model predicts a text.
"""

from __future__ import annotations

from .cache import KVCache
from .generation import generate, stream
from .layer import FusedLayer
from .model import FusedModel
from .optimize import fused_model, optimize
from .perplexity import perplexity, token_losses

__all__ = [
    "FusedLayer",
    "FusedModel",
    "KVCache",
    "fused_model",
    "generate",
    "optimize",
    "perplexity",
    "stream",
    "token_losses",
]
