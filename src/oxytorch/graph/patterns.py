"""The patterns that a captured graph is searched for, and their replacement.

Every match names the nodes that it replaces. A region is worth making at a module only if some
match needs that very module's code (its nodes do not all come from one inlined child); otherwise
the child gets a region of its own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..ops._post_op import PostOp
from .capture import Capture
from .fused import BatchNorm, Folded, FusedAddNorm, FusedGate, FusedLayer
from .recognize import Norm, Recognizer, activation_of_function
from .recommendation import (
    FusedEmbeddingBags,
    FusedInteraction,
    find_embedding_bags,
    find_interaction,
)

_ADD = (operator.add, operator.iadd, torch.add)
_IN_PLACE = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
    operator.setitem,
    operator.delitem,
)
_MULTIPLY = (operator.mul, torch.mul)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)
MODAL = (*_DROPOUT[:-1], *BatchNorm)
"""Layers that compute something else in training mode."""
_CONVOLUTION: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True)
class Match:
    """One replacement: what it is in words, and whether it needs the captured module's own code."""

    description: str
    at_root: bool
    layers: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Choices:
    """Which kinds of replacement are wanted."""

    fold: bool
    fuse: bool
    drop: bool


@dataclass
class Rewrite:
    """A capture's graph after replacement: its matches and the objects that the graph calls.

    folds: the normalizations folded, by the layer they were folded into.
    consumed: the modules that the graph no longer calls.
    """

    capture: Capture
    recognizer: Recognizer
    choices: Choices
    folds: dict[nn.Module, Folded] = field(default_factory=dict)
    matches: list[Match] = field(default_factory=list)
    fused: dict[str, Any] = field(default_factory=dict)
    consumed: list[nn.Module] = field(default_factory=list)

    def run(self) -> Rewrite:
        self.capture.graph.oxytorch_root = self.capture.module  # type: ignore[attr-defined]
        if self.choices.drop:
            self._drop_dropout()
        for node in list(self.capture.graph.nodes):
            if self._is_layer(node):
                self._fuse_layer(node)
        if self.choices.fuse:
            for node in list(self.capture.graph.nodes):
                self._fuse_add_norm(node)
            for node in list(self.capture.graph.nodes):
                self._fuse_gate(node)
            for node in list(self.capture.graph.nodes):
                self._fuse_embedding_bags(node)
            for node in list(self.capture.graph.nodes):
                self._fuse_interaction(node)
        return self

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if it calls one that has no hooks."""
        if node.op != "call_module" or not str(node.target).startswith("m."):
            return None
        module = self.capture.module.get_submodule(str(node.target)[2:])
        return None if module._forward_hooks or module._forward_pre_hooks else module

    def _erase(self, node: fx.Node) -> None:
        module = self.module(node)
        if module is not None:
            self.consumed.append(module)
        self.capture.graph.erase_node(node)

    def _drop_dropout(self) -> None:
        for node in list(self.capture.graph.nodes):
            module = self.module(node)
            dropped = module is not None and type(module) in _DROPOUT and not module.training
            dropped = dropped or (node.target is F.dropout and not _training(node))
            if dropped and isinstance(node.args[0], fx.Node):
                node.replace_all_uses_with(node.args[0])
                self._erase(node)

    def _is_layer(self, node: fx.Node) -> bool:
        module = self.module(node)
        if module is None or len(node.args) != 1 or node.kwargs:
            return False
        return is_packable_convolution(module) or self.recognizer.linear(module) is not None

    def _fuse_layer(self, node: fx.Node) -> None:
        layer = self.module(node)
        assert layer is not None
        chain, folded, other = [node], None, None
        norms: tuple[nn.Module, ...] = ()
        following = _only_user(node)
        norm = self.module(following) if following is not None else None
        if self.choices.fold and following is not None and _can_fold(layer, norm):
            assert norm is not None
            chain.append(following)
            norms = (norm,)
            folded = self.folds.setdefault(layer, Folded(layer, norm))
            following = _only_user(following)
        post_op = PostOp()
        if self.choices.fuse and following is not None:
            post_op = self._activation(following) or post_op
            if post_op.name != "none":
                chain.append(following)
            else:
                binary, other = self._binary(following, chain[-1])
                moved = binary is not None and not _mutation_between(node, following)
                if moved and not self._feeds_norm(following, layer):
                    chain.append(following)
                    post_op = PostOp(binary=binary)
                    following = _only_user(following)
                    relu = self._activation(following) if following is not None else None
                    if following is not None and relu == PostOp("relu") and _is_convolution(layer):
                        chain.append(following)
                        post_op = PostOp("relu", binary=binary)
                else:
                    other = None
        padding, padded = self._padding(node, layer)
        if padded is not None:
            chain.insert(0, padded)
        if len(chain) == 1:
            return
        source = node.args[0] if padded is None else padded.args[0]
        name = "convolution" if _is_convolution(layer) else "linear"
        parts = [
            f"padding + {name}" if padded else name,
            "folded batch norm" if folded else "",
            str(post_op),
        ]
        call = FusedLayer(layer, post_op, folded, padding)
        arguments = (source,) if other is None else (source, other)
        self._replace(chain, call, arguments, " + ".join(p for p in parts if p), (layer, *norms))

    def _padding(
        self, node: fx.Node, layer: nn.Module
    ) -> tuple[tuple[int, ...] | None, fx.Node | None]:
        """Zeros that a node of its own puts evenly around a convolution's input, and that node."""
        pad = node.args[0]
        if not self.choices.fuse or not isinstance(pad, fx.Node) or pad.target is not F.pad:
            return None, None
        names = ("input", "pad", "mode", "value")
        given = {**dict(zip(names, pad.args, strict=False)), **pad.kwargs}
        sides, spatial = given.get("pad"), _CONVOLUTION.get(type(layer), 0)
        if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0):
            return None, None
        if not isinstance(sides, (list, tuple)) or not all(type(s) is int for s in sides):
            return None, None
        pairs = [*zip(sides[::2], sides[1::2], strict=True)]
        even = all(left == right >= 0 for left, right in pairs) and len(pairs) <= spatial
        if not even or len(pad.users) != 1 or not pad.args or _mutation_between(pad, node):
            return None, None
        missing = (0,) * (spatial - len(pairs))
        return (*missing, *(left for left, _ in reversed(pairs))), pad

    def _activation(self, node: fx.Node) -> PostOp | None:
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        if node.op == "call_module":
            module = self.module(node)
            return None if module is None else self.recognizer.activation(module)
        if node.op in ("call_function", "call_method"):
            return activation_of_function(node.target, node.args, dict(node.kwargs))
        return None

    def _binary(self, node: fx.Node, left: fx.Node) -> tuple[str | None, fx.Node | None]:
        """The binary post-operation of `left` that a node computes, with its other operand."""
        kind = "add" if node.target in _ADD else "mul" if node.target in _MULTIPLY else None
        if node.op != "call_function" or kind is None or node.kwargs:
            return None, None
        if len(node.args) != 2 or node.args[0] is node.args[1]:
            return None, None
        if node.target is operator.iadd and node.args[0] is not left:
            return None, None
        other = node.args[1] if node.args[0] is left else node.args[0]
        return (kind, other) if isinstance(other, fx.Node) else (None, None)

    def _feeds_norm(self, node: fx.Node, layer: nn.Module) -> bool:
        return not _is_convolution(layer) and any(self._norm(user) for user in node.users)

    def _norm(self, node: fx.Node) -> Norm | None:
        module = self.module(node)
        return None if module is None else self.recognizer.norm(module)

    def _fuse_add_norm(self, node: fx.Node) -> None:
        norm, module = self._norm(node), self.module(node)
        if norm is None or module is None or len(node.args) != 1 or node.kwargs:
            return
        add = node.args[0]
        if not isinstance(add, fx.Node) or add.target not in _ADD or add.kwargs:
            return
        if len(add.args) != 2 or not all(isinstance(a, fx.Node) for a in add.args):
            return
        if add.target is operator.iadd and len(add.args[0].users) > 1:  # type: ignore[union-attr]
            return
        if _mutation_between(add, node):
            return
        keep_total = len(add.users) > 1
        call = FusedAddNorm(module, norm, keep_total)
        name = f"add + {norm.kind}"
        if not keep_total:
            self._replace([add, node], call, add.args, name, (module,))
            return
        graph = self.capture.graph
        with graph.inserting_before(add):
            pair = graph.call_module(self._named(call), add.args)
            normed = graph.call_function(operator.getitem, (pair, 0))
            total = graph.call_function(operator.getitem, (pair, 1))
        self._record(name, [add, node], (module,), (pair, normed, total))
        node.replace_all_uses_with(normed)
        self._erase(node)
        add.replace_all_uses_with(total)
        self._erase(add)

    def _fuse_gate(self, node: fx.Node) -> None:
        if node.target not in _MULTIPLY or node.kwargs or len(node.args) != 2:
            return
        for gate, up in (node.args, node.args[::-1]):
            if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or gate is up:
                continue
            post_op = self._activation(gate)
            if post_op is None or post_op.name not in ("gelu", "swish") or len(gate.users) != 1:
                continue
            call = FusedGate(post_op)
            self._replace([gate, node], call, (gate.args[0], up), f"{post_op} * up", ())
            return

    def _fuse_embedding_bags(self, node: fx.Node) -> None:
        joined = node.args[0] if node.target in (torch.stack, torch.cat) else None
        if not isinstance(joined, (list, tuple)):
            return
        found = find_embedding_bags(self.module, list(joined))
        if found is None:
            return
        bags, modules = found
        graph = self.capture.graph
        last = max(bags, key=list(graph.nodes).index)
        if any(list(bag.users) != [node] for bag in bags):
            return
        with graph.inserting_after(last):
            columns = zip(*(bag.args for bag in bags), strict=True)
            arguments = tuple(list(column) for column in columns)
            merged = graph.call_module(self._named(FusedEmbeddingBags(modules)), arguments)
        with graph.inserting_after(merged):
            picked = [graph.call_function(operator.getitem, (merged, i)) for i in range(len(bags))]
        self._record(f"{len(bags)} embedding bags in one", bags, tuple(modules), (merged, *picked))
        for bag, pick in zip(bags, picked, strict=True):
            bag.replace_all_uses_with(pick)
            self._erase(bag)

    def _fuse_interaction(self, node: fx.Node) -> None:
        found = find_interaction(self.capture, node)
        if found is not None:
            dense, sparse, chain = found
            call = FusedInteraction()
            self._replace(chain, call, (dense, sparse), "pairwise interaction", ())

    def _replace(
        self,
        chain: list[fx.Node],
        call: Any,
        arguments: tuple[Any, ...],
        description: str,
        layers: tuple[nn.Module, ...],
    ) -> None:
        graph, last = self.capture.graph, chain[-1]
        with graph.inserting_before(last):
            fused = graph.call_module(self._named(call), arguments)
        self._record(description, chain, layers, (fused,))
        last.replace_all_uses_with(fused)
        for node in reversed(chain):
            self._erase(node)

    def _named(self, call: Any) -> str:
        name = f"fused_{len(self.fused)}"
        self.fused[name] = call
        return name

    def _record(
        self,
        description: str,
        nodes: list[fx.Node],
        layers: tuple[nn.Module, ...],
        made: tuple[fx.Node, ...],
    ) -> None:
        owners = [self.capture.owner[node] for node in nodes]
        first = {owner[:1] for owner in owners}
        at_root = len(first) > 1 or () in first
        for node in made:
            self.capture.owner[node] = _common(owners)
        self.matches.append(Match(description, at_root, layers))


def is_packable_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution that oneDNN's pre-packed form covers."""
    return (
        type(module) in _CONVOLUTION
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _is_convolution(module: nn.Module) -> bool:
    return type(module) in _CONVOLUTION


def _can_fold(layer: nn.Module, norm: nn.Module | None) -> bool:
    if not isinstance(norm, BatchNorm) or type(norm) not in BatchNorm:
        return False
    if norm.running_mean is None or norm.running_var is None or norm.training:
        return False
    weight = layer._parameters["weight"]
    assert weight is not None
    spatial = 1 if type(norm) is nn.BatchNorm1d else (2 if type(norm) is nn.BatchNorm2d else 3)
    expected = _CONVOLUTION.get(type(layer), 1)
    fits = spatial == expected and (type(layer) in _CONVOLUTION or type(layer) is nn.Linear)
    return fits and weight.shape[0] == norm.num_features and weight.is_floating_point()


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _mutation_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node between two others writes to a tensor in place: then nothing may be moved."""
    node = first.next
    while node is not last and node.op != "root":
        if _mutates(node):
            return True
        node = node.next
    return False


def _mutates(node: fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_module":
        owner = node.graph.oxytorch_root  # type: ignore[attr-defined]
        target = str(node.target)
        return target.startswith("m.") and bool(
            getattr(owner.get_submodule(target[2:]), "inplace", False)
        )
    return False


def _training(node: fx.Node) -> bool:
    return bool(node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True))


def _common(owners: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest common beginning of several owner paths."""
    shortest = min(owners, key=len)
    for i, name in enumerate(shortest):
        if any(owner[i] != name for owner in owners):
            return shortest[:i]
    return shortest
