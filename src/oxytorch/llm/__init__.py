"""Language models of transformers on the CPU: fused decoder layers and packed weights.

`optimize` makes a model faster and keeps its class. `generate` and `stream` generate text with
little work between two tokens, over a `KVCache`. `perplexity` measures how well a model predicts a
text. A `LanguageModel` is what `oxytorch.load` returns for one that `oxytorch.save` wrote.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .cache import KVCache
    from .generation import generate, stream
    from .language_model import LanguageModel
    from .layer import DecoderLayer
    from .optimize import optimize
    from .perplexity import perplexity, token_losses
    from .record import FusedModel, fused_model

__all__ = [
    "DecoderLayer",
    "FusedModel",
    "KVCache",
    "LanguageModel",
    "fused_model",
    "generate",
    "optimize",
    "perplexity",
    "stream",
    "token_losses",
]

_LATER = {
    "DecoderLayer": "layer",
    "FusedModel": "record",
    "KVCache": "cache",
    "LanguageModel": "language_model",
    "fused_model": "record",
    "generate": "generation",
    "optimize": "optimize",
    "perplexity": "perplexity",
    "stream": "generation",
    "token_losses": "perplexity",
}
sys.modules[__name__].__class__ = _lazy.Package
