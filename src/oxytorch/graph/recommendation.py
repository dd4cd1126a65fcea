"""Patterns of recommendation models: many embedding bags at once, and pairwise products."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from .. import ops
from .capture import Capture

_PRODUCT = (torch.bmm, torch.matmul, operator.matmul)


class FusedEmbeddingBags:
    """Several embedding bags in one sweep. Returns one [batch, dim] view per table."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def __call__(
        self, indices: list[torch.Tensor], offsets: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        weights: list[Any] = [module._parameters["weight"] for module in self.modules]
        if not self._fits(indices, offsets, weights):
            return [m(i, o) for m, i, o in zip(self.modules, indices, offsets, strict=True)]
        mode = str(self.modules[0].mode)
        merged = ops.merged_embedding_bag(weights, indices, offsets, mode)
        return list(merged.view(merged.shape[0], len(weights), -1).unbind(1))

    def _fits(
        self,
        indices: list[torch.Tensor],
        offsets: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> bool:
        rows = offsets[0].shape
        return (
            all(i.dim() == 1 and i.dtype == indices[0].dtype for i in indices)
            and all(o.shape == rows and o.dtype == indices[0].dtype for o in offsets)
            and all(w.dtype == weights[0].dtype for w in weights)
        )


class FusedInteraction:
    """The dense vector and the products of all pairs of vectors (ops.interaction)."""

    def __call__(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        dense = dense.to(sparse[0].dtype)
        return ops.interaction(dense, sparse)


def find_interaction(
    capture: Capture, node: fx.Node
) -> tuple[fx.Node, list[fx.Node], list[fx.Node]] | None:
    """Match cat([dense, lower triangle of bmm(v, v^T)]) with v = stack([dense, *sparse], 1).

    Returns the dense node, the sparse nodes and all nodes that the match replaces, or None.
    """
    if node.target is not torch.cat or _dim(node) not in (1, -1):
        return None
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    dense, pairs = parts
    if not isinstance(dense, fx.Node) or not isinstance(pairs, fx.Node):
        return None
    if pairs.target is not operator.getitem or len(pairs.users) != 1:
        return None
    products, place = pairs.args
    if not isinstance(products, fx.Node) or products.target not in _PRODUCT:
        return None
    vectors, turned = products.args
    if not isinstance(vectors, fx.Node) or not _is_transposed(turned, vectors):
        return None
    stacked = vectors.args[0] if vectors.target is torch.stack and _dim(vectors) == 1 else None
    if not isinstance(stacked, (list, tuple)) or len(stacked) < 2 or stacked[0] is not dense:
        return None
    if not all(isinstance(v, fx.Node) for v in stacked):
        return None
    if not _is_lower_triangle(capture, place, len(stacked)):
        return None
    assert isinstance(turned, fx.Node)
    chain = [vectors, turned, products, pairs, node]
    if any(set(n.users) - set(chain) for n in chain[:-1]):
        return None
    return dense, list(stacked[1:]), chain


def _dim(node: fx.Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


def _is_transposed(node: Any, of: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.args[:1] != (of,):
        return False
    if node.target in ("transpose", torch.transpose):
        return set(node.args[1:]) in ({1, 2}, {-1, -2}, {1, -1}, {2, -2})
    if node.target in ("permute", torch.permute):
        return tuple(node.args[1:]) in ((0, 2, 1), ((0, 2, 1),), ([0, 2, 1],))
    return node.target is getattr and node.args[1] == "mT"


def _is_lower_triangle(capture: Capture, place: Any, vectors: int) -> bool:
    """Whether an index (:, rows, columns) reads the strictly lower triangle row by row."""
    if not isinstance(place, tuple) or len(place) != 3 or place[0] != slice(None):
        return False
    wanted = torch.tril_indices(vectors, vectors, offset=-1)
    for node, expected in zip(place[1:], wanted, strict=True):
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return False
        path, _, name = str(node.target).removeprefix("m.").rpartition(".")
        values = getattr(capture.module.get_submodule(path), name)
        if not isinstance(values, torch.Tensor) or values.shape != expected.shape:
            return False
        if not torch.equal(values.cpu(), expected):
            return False
    return True


def find_embedding_bags(
    module_of: Callable[[fx.Node], nn.Module | None], nodes: list[Any]
) -> tuple[list[fx.Node], list[nn.Module]] | None:
    """Return those of `nodes` that are calls of alike embedding bags on (indices, offsets).

    module_of: the module that a node calls, or None.
    """
    found: list[tuple[fx.Node, nn.Module]] = []
    for node in nodes:
        if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
            continue
        module = module_of(node)
        if type(module) is nn.EmbeddingBag and is_plain_bag(module):
            found.append((node, module))
    if len(found) < 2:
        return None
    first = found[0][1]
    alike = [
        (n, m)
        for n, m in found
        if (m.mode, m.embedding_dim) == (first.mode, first.embedding_dim)
        and not m.include_last_offset
    ]
    if len(alike) < 2:
        return None
    return [n for n, _ in alike], [m for _, m in alike]


def is_plain_bag(module: nn.Module) -> bool:
    """Whether an embedding bag is a plain sum or mean, without renormalization or padding."""
    return (
        module.mode in ("sum", "mean")
        and module.max_norm is None
        and module.padding_idx is None
        and not module.sparse
    )
