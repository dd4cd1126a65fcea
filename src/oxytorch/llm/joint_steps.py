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


def exact_rows(model: FusedModel, vocabulary: int, most: int) -> int:
    """The most sequences, at most `most` and else a power of two, whose joint steps give the very
    logits that each has alone. Tried on random tokens; products round by their number of rows.
    """
    draw = torch.Generator().manual_seed(0)
    rows = most
    while rows > 1 and not _rounds_alike(model, vocabulary, rows, draw):
        rows = 1 << ((rows - 1).bit_length() - 1)
    return rows


def _rounds_alike(model: FusedModel, vocabulary: int, rows: int, draw: torch.Generator) -> bool:
    tokens = torch.randint(vocabulary, (rows, _READ + rows + _STEPS), generator=draw)
    joint, single = ([model.cache(1, tokens.shape[1]) for _ in range(rows)] for _ in range(2))
    for row in range(rows):
        for caches in (joint, single):
            model.step(tokens[row : row + 1, : _READ + row], caches[row])
    for place in range(_READ + rows, _READ + rows + _STEPS):
        column = tokens[:, place : place + 1]
        found = joint_step(model, column, joint)
        alone = [model.step(column[row : row + 1], single[row]) for row in range(rows)]
        if not torch.equal(found, torch.cat(alone)):
            return False
    return True


_READ = 16
_STEPS = 4
"""Tokens that are read before, and steps that are compared."""
