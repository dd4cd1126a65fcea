"""Patterns of recommendation models: many embedding bags at once, and pairwise products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops

_PRODUCT = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)


class FusedEmbeddingBags:
    """Several embedding bags in one sweep. Returns one [batch, dim] view per table."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, indices: list[Tensor], offsets: list[Tensor]) -> list[Tensor]:
        weights: list[Any] = [module._parameters.get("weight") for module in self.modules]
        if any(w is None for w in weights) or not self._fits(indices, offsets, weights):
            return self._one_by_one(indices, offsets)
        mode = str(self.modules[0].mode)
        try:
            merged = ops.merged_embedding_bag(weights, indices, offsets, mode)
        except RuntimeError:  # the modules say what is wrong
            return self._one_by_one(indices, offsets)
        return list(merged.view(merged.shape[0], len(weights), -1).unbind(1))

    def _one_by_one(self, indices: list[Tensor], offsets: list[Tensor]) -> list[Tensor]:
        return [m(i, o) for m, i, o in zip(self.modules, indices, offsets, strict=True)]

    def _fits(
        self,
        indices: list[Tensor],
        offsets: list[Tensor],
        weights: list[Tensor],
    ) -> bool:
        rows = offsets[0].shape
        return (
            all(i.dim() == 1 and i.dtype == indices[0].dtype for i in indices)
            and all(o.shape == rows and o.dtype == indices[0].dtype for o in offsets)
            and all(w.dtype == weights[0].dtype for w in weights)
        )


class FusedInteraction:
    """The dense vector and the products of all pairs of vectors (ops.interaction)."""

    def __call__(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        dense = dense.to(sparse[0].dtype)
        return ops.interaction(dense, sparse)


def find_interaction(
    patterns: Any, number: int
) -> tuple[Any, list[Any], list[int], tuple[Tensor, ...]] | None:
    """Match cat([dense, lower triangle of bmm(v, v^T)]) with v = stack([dense, *sparse], 1).

    patterns: the `Patterns` of the record. Returns the dense value, the sparse values, the steps
    that the match replaces and the tensors whose values it depends on, or None.
    """
    steps = patterns.steps
    parts = _joined(steps[number], torch.cat, (1, -1))
    if parts is None or len(parts) != 2:
        return None
    dense, pairs = parts
    picked = patterns.maker(pairs)
    if picked is None or steps[picked].target is not Tensor.__getitem__:
        return None
    products, place = steps[picked].arguments[0]
    product = patterns.maker(products)
    if product is None or steps[product].target not in _PRODUCT:
        return None
    vectors, turned = steps[product].arguments[0]
    turn, stack = patterns.maker(turned), patterns.maker(vectors)
    if turn is None or stack is None or not _is_transposed(steps[turn], vectors):
        return None
    stacked = _joined(steps[stack], torch.stack, (1,))
    if stacked is None or len(stacked) < 2 or stacked[0] != dense:
        return None
    watched = _lower_triangle(place, len(stacked))
    chain = [stack, turn, product, picked, number]
    users = [{*patterns._users[value.number]} for value in (vectors, turned, products, pairs)]
    if watched is None or any(used - {*chain} for used in users):
        return None
    return dense, [*stacked[1:]], chain, watched


def _joined(step: Any, function: Any, dims: tuple[int, ...]) -> list[Any] | None:
    """The tensors that a step stacks or concatenates along one of these dimensions."""
    args, kwargs = step.arguments
    if step.target is not function or not args or not isinstance(args[0], (list, tuple)):
        return None
    return [*args[0]] if kwargs.get("dim", args[1] if len(args) > 1 else 0) in dims else None


def _is_transposed(step: Any, of: Any) -> bool:
    args, kwargs = step.arguments
    if args[:1] != (of,) or kwargs:
        return False
    if step.target in (Tensor.transpose, torch.transpose):
        return {*args[1:]} in ({1, 2}, {-1, -2}, {1, -1}, {2, -2})
    if step.target in (Tensor.permute, torch.permute):
        return tuple(args[1:]) in ((0, 2, 1), ((0, 2, 1),), ([0, 2, 1],))
    return False


def _lower_triangle(place: Any, vectors: int) -> tuple[Tensor, ...] | None:
    """The tensors of an index (:, rows, columns) that reads the strictly lower triangle by rows."""
    if not isinstance(place, tuple) or len(place) != 3 or place[0] != slice(None):
        return None
    wanted = torch.tril_indices(vectors, vectors, offset=-1, device="cpu")
    found = []
    for held, expected in zip(place[1:], wanted, strict=True):
        values = getattr(held, "read", lambda: None)()
        if not isinstance(values, Tensor) or values.shape != expected.shape:
            return None
        if not torch.equal(values.cpu(), expected):
            return None
        found.append(values)
    return tuple(found)


def alike_bags(found: list[tuple[int, nn.Module, Any]]) -> list[tuple[int, nn.Module, Any]]:
    """Return those of some calls (number, module, arguments) that one call can compute: embedding
    bags of one kind on (indices, offsets)."""
    plain = [
        bag
        for bag in found
        if type(bag[1]) is nn.EmbeddingBag and is_plain_bag(bag[1]) and len(bag[2]) == 2
    ]
    return [
        bag
        for bag in plain
        if (bag[1].mode, bag[1].embedding_dim) == (plain[0][1].mode, plain[0][1].embedding_dim)
        and not bag[1].include_last_offset
    ]


def is_plain_bag(module: nn.Module) -> bool:
    """Whether an embedding bag is a plain sum or mean, without renormalization or padding."""
    has: Any = module.__dict__
    return (
        has["mode"] in ("sum", "mean")
        and has["max_norm"] is None
        and has["padding_idx"] is None
        and not has["sparse"]
        and module._parameters.get("weight") is not None
    )
