"""One token for each of several sequences that have lengths and caches of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import KVCache
from .record import FusedModel


def can_join(model: FusedModel) -> bool:
    """Whether sequences can step together: not where angles depend on the longest position."""
    return not any(table.changing for table in model.tables)


def joint_step(model: FusedModel, tokens: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """Logits [sequences, 1, vocabulary] after a token of each, which its cache then counts.

    Weights are read once for all of them; each attends over its own cache.
    tokens: int64 [sequences, 1]. caches: of one sequence each, with room for one more token.
    """
    starts = [cache.length for cache in caches]
    positions = torch.tensor(starts)[:, None]
    hidden = model.embedded(tokens, 0, positions)
    angles = [table.at(positions) for table in model.tables]
    for index, layer in enumerate(model.layers):
        table = model.rotary[index]
        cos, sin = (None, None) if table is None else angles[table]
        layers = [cache.layers[index] for cache in caches]
        hidden = layer.step(hidden, layers, starts, cos, sin)
    for cache in caches:
        cache.length += 1
    return model.logits(hidden)
