"""The record of a language model without the model: with numbers in place of its modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.panels import PanelWeight
from ..quantization.weights import ReorderedPanelWeight
from .description import Parameters
from .layer import Product
from .record import Angles, FusedModel, HeadProduct, RotaryTable

_AT_ONCE = 4096
"""Rows of an embedding, or positions, that are compared at a time."""


def detached(model: FusedModel, positions: int) -> FusedModel:
    """The same record whose embedding, head and rotary embeddings are numbers.

    positions: up to which the angles are compared. Its layers still name modules, of which they
    read the parameters alone. Raises ValueError for a module that computes something else than its
    numbers say.
    """
    embedding, factor = _embedding(model.embedding)
    if factor is not None and model.scale is not None:
        raise ValueError("its embedding is scaled twice, and a file holds one factor")
    return dataclasses.replace(
        model,
        embedding=embedding,
        tables=[_table(table, positions) for table in model.tables],
        head=_head(model.head),
        scale=model.scale if factor is None else factor,
        standing=None,
    )


def _numbers(module: nn.Module) -> Iterator[Tensor]:
    """The floating tensors and numbers that a module keeps, but its parameters."""
    for value in (*module._buffers.values(), *module.__dict__.values()):
        if isinstance(value, float):
            yield torch.tensor(value, device="cpu")
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield value.detach()


def _embedding(module: nn.Module) -> tuple[Parameters, float | None]:
    """An embedding's rows, and what they are multiplied with, or None."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, PanelWeight):
        raise ValueError(f"its embedding is a {type(module).__name__} without plain rows")
    kept = Parameters(weight)
    factors = [None, *(float(each) for each in _numbers(module) if each.numel() == 1)]
    for factor in factors:
        if all(
            torch.equal(module(tokens), _scaled(F.embedding(tokens, weight), factor))
            for tokens in torch.split(torch.arange(len(weight), device="cpu"), _AT_ONCE)
        ):
            return kept, factor
    raise ValueError(
        f"its embedding, a {type(module).__name__}, computes something else than rows of its weight"
    )


def _scaled(rows: Tensor, factor: float | None) -> Tensor:
    return rows if factor is None else rows * torch.tensor(factor, dtype=rows.dtype, device="cpu")


def _table(table: RotaryTable, positions: int) -> RotaryTable:
    """A rotary table by the frequencies that its module keeps."""
    if isinstance(table.rotation, Angles):
        return table
    module = table.rotation.module
    kind = type(module).__name__
    if table.changing:
        raise ValueError(
            f"the angles of its rotary embedding, a {kind}, depend on the length of the text"
        )
    nowhere = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    first, _ = table.rotation(torch.empty(0, device="cpu"), nowhere)
    dtype = table.made(nowhere)[0].dtype  # some modules keep float32
    for found in _numbers(module):
        half = found.float()
        if 2 * half.numel() != first.shape[-1]:
            continue
        for frequencies in (torch.cat([half, half]), half.repeat_interleave(2)):
            if table.repeat_interleave:
                frequencies = half.repeat_interleave(2)
            kept = RotaryTable(Angles(frequencies, float(first[0, 0, 0])), dtype)
            if _is_same(table, kept, positions):
                return kept
    raise ValueError(f"it is not known how its rotary embedding, a {kind}, makes its angles")


def _is_same(one: RotaryTable, other: RotaryTable, positions: int) -> bool:
    return all(
        own.dtype == found.dtype and torch.equal(own, found)
        for part in torch.split(torch.arange(positions, device="cpu")[None], _AT_ONCE, dim=1)
        for own, found in zip(one.made(part), other.made(part), strict=True)
    )


def _head(head: HeadProduct | Product) -> Product:
    """An output head's weight, packed or plain."""
    if isinstance(head, Product):
        return head
    parameters: dict[str, Any] = head.module._parameters
    weight, bias = parameters["weight"], parameters.get("bias")
    if isinstance(weight, ReorderedPanelWeight):
        return Product(weight.packed, bias, order=weight.order)
    kind = type(head.module)
    if not isinstance(weight, PanelWeight) and kind.forward is not nn.Linear.forward:
        raise ValueError(f"its output head is a {kind.__name__}, which is no nn.Linear")
    return Product(weight, bias)
