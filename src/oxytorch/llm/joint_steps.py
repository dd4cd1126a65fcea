"""One token for each of several sequences that have lengths and caches of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .. import isa
from ..ops.panels import PanelWeight
from ..ops.panels.formats import FORMATS
from .cache import CacheSlots
from .generation import MOST_GUESSES
from .layer import Product, RoutedMlp
from .record import FusedModel

_ALL_ROWS = 1 << 20

MOST_DIGIT_ROWS = 32
"""The most rows of bfloat16 that are multiplied with codes as integers of 15 bits."""

LEAST_DIGIT_GROUP = 64
"""The least inputs of a group of codes for which that holds; for shorter ones few rows are."""

_BLOCK = 128
"""Inputs whose products are summed as integers, however many rows there are."""


def can_join(model: FusedModel) -> bool:
    """Whether sequences can step together: not where angles depend on the longest position."""
    return not any(table.changing for table in model.tables)


def joint_step(
    model: FusedModel, tokens: Tensor, caches: CacheSlots, rows: Sequence[int]
) -> Tensor:
    """Logits [sequences, 1, vocabulary] after a token of each, which its cache then counts.

    Weights are read once for all of them; each attends over its own cache.
    tokens: int64 [sequences, 1].
    rows: their slots, with room for one more token.
    """
    places = torch.tensor(rows, device="cpu")
    starts = torch.tensor([caches.slots[row].length for row in rows], device="cpu")
    positions = starts[:, None]
    hidden = model.embedded(tokens, 0, positions)
    angles = [table.at(positions) for table in model.tables]
    for index, layer in enumerate(model.layers):
        table = model.rotary[index]
        cos, sin = (None, None) if table is None else angles[table]
        hidden = layer.step(hidden, caches.shared.layers[index], starts, cos, sin, rows=places)
    for row in rows:
        caches.slots[row].length += 1
    return model.logits(hidden)


def most_alike_rows(model: FusedModel) -> int:
    """The most rows of a product that have the sums that each has alone, or any number of rows if
    not even two have.

    Products of integers of 8 bits are summed in the same blocks for any number of rows, those of 15
    bits for up to MOST_DIGIT_ROWS. Others have the sums of one row for few rows, where they do.
    """
    weights = [*_weights(model)]
    most = min(_known_rows(each) if isinstance(each, PanelWeight) else 1 for each in weights)
    return most if most > 1 else _ALL_ROWS


def _known_rows(weight: PanelWeight) -> int:
    has_codes = FORMATS[weight.format].middle is not None and isa.has("vectors_256")
    if has_codes and weight.activation_dtype == "int8" and (weight.group_size or 0) <= _BLOCK:
        return _ALL_ROWS
    if weight.dtype != torch.bfloat16:
        return 1
    if has_codes and weight.activation_dtype is None and isa.has("int8_dot"):
        is_short = 0 < (weight.group_size or 0) < LEAST_DIGIT_GROUP
        return MOST_GUESSES + 1 if is_short else MOST_DIGIT_ROWS
    return MOST_GUESSES + 1 if has_codes or isa.has("fast_bf16_dot") else 1


def _weights(model: FusedModel) -> Iterator[Tensor | None]:
    """The weights of all products of a step."""
    for layer in model.layers:
        mlp = layer.mlp
        products = [layer.attention.qkv, layer.attention.output]
        if isinstance(mlp, RoutedMlp):
            products += [mlp.router, *mlp.gate_up, *mlp.down]
        else:
            products += [mlp.up, mlp.down]
        yield from (product.weight for product in products)
    head = model.head
    yield head.weight if isinstance(head, Product) else head.module._parameters["weight"]


def exact_rows(model: FusedModel, vocabulary: int, most: int) -> int:
    """The most sequences, at most `most`, of which any number gives in a joint step the very logits
    that each has alone.

    Products round by their number of rows: each kind of product is tried with every number, then
    the whole model on random tokens.
    """
    draw = torch.Generator().manual_seed(0)
    rows = most
    for weight in _kinds(model):
        rows = _alike_rows(Product(weight), rows, draw)
    while rows > 1 and not _rounds_alike(model, vocabulary, rows, draw):
        rows = 1 << ((rows - 1).bit_length() - 1)
    return rows


def _kinds(model: FusedModel) -> Iterable[Tensor]:
    """A weight for each kind of product; gated ones sum as the others of their format do."""
    weights = [
        weight
        for weight in _weights(model)
        if weight is not None and not (isinstance(weight, PanelWeight) and weight.is_gated)
    ]
    return {(type(each), each.shape, each.dtype): each for each in weights}.values()


def _alike_rows(product: Product, most: int, draw: torch.Generator) -> int:
    """The most rows, up to which any number of rows has the sums of each row alone."""
    outputs, inputs = product.weight.shape
    for _ in range(-(-_COMPARED // outputs)):
        x = torch.randn(most, inputs, generator=draw, device="cpu").to(product.weight.dtype)
        # What is left beside the rounded sums shows digits that rounding them hides.
        singles = [x[row : row + 1] for row in range(most)]
        rounded = [-product(row) for row in singles]
        rest = [product(row, "add", sum_) for row, sum_ in zip(singles, rounded, strict=True)]
        for rows in range(2, most + 1):
            found = product(x[:rows], "add", torch.cat(rounded[:rows]))
            if not torch.equal(found, torch.cat(rest[:rows])):
                most = rows - 1
                break
    return most


def _rounds_alike(model: FusedModel, vocabulary: int, rows: int, draw: torch.Generator) -> bool:
    tokens = torch.randint(vocabulary, (rows, _READ + rows + _STEPS), generator=draw, device="cpu")
    joint = model.slots(rows, tokens.shape[1])
    single = [model.cache(1, tokens.shape[1]) for _ in range(rows)]
    for row in range(rows):
        for cache in (joint.slots[row], single[row]):
            model.step(tokens[row : row + 1, : _READ + row], cache)
    for place in range(_READ + rows, _READ + rows + _STEPS):
        column = tokens[:, place : place + 1]
        found = joint_step(model, column, joint, range(rows))
        alone = [model.step(column[row : row + 1], single[row]) for row in range(rows)]
        if not torch.equal(found, torch.cat(alone)):
            return False
    return True


_COMPARED = 4096
"""Sums of each row that are compared: one in a hundred shows another order of its terms."""

_READ = 16
_STEPS = 4
"""Tokens that are read before, and steps that are compared."""
