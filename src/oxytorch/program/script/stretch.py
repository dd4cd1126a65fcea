"""A stretch of nodes of a graph as steps, which passes can change."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...graph.errors import CaptureError
from ..capture import Capture
from ..numbered import as_given
from ..program import Step, Value
from .metas import UNKNOWN, Metas
from .types import operator_of

KEPT = "script::"
"""Begins the targets of steps that stand for nodes as they are: script::3:aten::size."""

_AS_THEY_ARE = (
    "aten::arange",
    "aten::baddbmm",
    "aten::clamp",
    "aten::full",
    "aten::scalar_tensor",
    "aten::fill",
)
"""Begins the operators that a program writes in several others, for which no pass looks."""
_MAKES_MORE = ("aten::pow",)
"""Operators that may become several steps."""
LISTS = ("prim::ListConstruct", "prim::TupleConstruct")


class Stretch(Capture):
    """The steps of nodes that follow each other in a block, write to nothing and draw nothing.

    A node of which something is not known, or which a program cannot hold, is a step that no pass
    knows, with what it takes and makes.

    nodes: of the stretch.
    kept: nodes that steps stand for, by number.
    sources: what values stand for.
    taken_outside: the values of the graph that others take, in the order of the steps' outputs.
    why_kept: for each operator that no pass sees, the reason.
    """

    def __init__(self, nodes: Sequence[Any], metas: Metas) -> None:
        super().__init__()
        self.nodes = nodes
        self._inside = {*map(id, nodes)}
        self.kept: list[Any] = []
        self.taken_outside: list[Any] = []
        self.sources: dict[Value, Any] = {}
        self.why_kept: dict[str, str] = {}
        self._metas = metas
        self._standing: dict[int, Value] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._lists: dict[int, Any] = {}
        self._fx = fx.Graph()
        self._moment = Value()  # keeps what a program cannot run from being computed ahead
        self.steps.inputs.append(self._moment)
        for node in nodes:
            self._take(node)
        self._end()

    def _take(self, node: Any) -> None:
        if node.kind() == "prim::Constant":
            return
        if node.kind() in LISTS:
            self._lists[node.output().unique()] = node
            return
        if node.kind() == "prim::ListUnpack" and self._unpacked(node):
            return
        count = len(self.steps.steps)
        try:
            self._call_of(node)
        except CaptureError as error:
            self._forget(count)
            if node.kind().startswith("aten::") and self._has_tensor(node):
                self.why_kept.setdefault(node.kind(), str(error))
            self._keep(node)

    def _forget(self, count: int) -> None:
        """Forget the steps from a number on, and the lists that were made for them."""
        made = {value for step in self.steps.steps[count:] for value in step.results}
        del self.steps.steps[count:]
        for place in [p for p, value in self._standing.items() if value in made]:
            del self._standing[place]
            self._nodes.pop(place, None)

    def _has_tensor(self, node: Any) -> bool:
        return any(each.type().kind() == "TensorType" for each in node.outputs())

    def _call_of(self, node: Any) -> None:
        """Write the call of an operator as steps. Raises CaptureError."""
        func = operator_of(node)
        outputs = [*node.outputs()]
        if func is None:
            raise CaptureError(f"{node.kind()} is no operator")
        metas = [self._metas.of(each) for each in outputs]
        if any(meta is UNKNOWN for meta in metas):
            reasons = (self._metas.reasons.get(each.unique()) for each in outputs)
            reason = next(filter(None, reasons), "it gives no tensor")
            raise CaptureError(f"its result is not known: {reason}")
        arguments = [
            self._given(value, argument)
            for value, argument in zip(node.inputs(), func._schema.arguments, strict=True)
        ]
        if node.kind() == "aten::_convolution":  # as traces have it
            func = torch.ops.aten.convolution.default
            arguments = arguments[: len(func._schema.arguments)]
        as_it_is = node.kind().startswith(_AS_THEY_ARE)
        if as_it_is or (node.kind() == "aten::hardtanh" and arguments[1:] != [0, 6]):
            raise CaptureError("no pass looks for it")
        if not all(map(_is_of_tensors, metas)):
            raise CaptureError("it gives no tensor")
        call = self._fx.create_node("call_function", func, tuple(arguments), {})
        call.meta["val"] = metas[0] if len(metas) == 1 else tuple(metas)
        parts = self._parts(call, outputs, metas)
        count = len(self.steps.steps)
        self.add(call)
        if len(self.steps.steps) - count > 1 and not node.kind().startswith(_MAKES_MORE):
            raise CaptureError("no pass looks for it")
        for output, part in zip(outputs, parts, strict=True):
            if part is not call:
                self.add(part)
            found = self.values[part]
            if isinstance(found, Value):
                self._name(output, part, found)
            else:
                self._nodes[output.unique()] = part

    def _parts(self, call: fx.Node, outputs: Sequence[Any], metas: Sequence[Any]) -> list[fx.Node]:
        """A node for each result."""
        if len(outputs) == 1:
            if isinstance(metas[0], list | tuple):
                self._check_unpacked(outputs[0])
            return [call]
        parts = []
        for place, meta in enumerate(metas):
            part = self._fx.create_node("call_function", operator.getitem, (call, place), {})
            part.meta["val"] = meta
            parts.append(part)
        return parts

    def _check_unpacked(self, value: Any) -> None:
        """A list of tensors has to be taken apart here, and only that."""
        users = [use.user for use in value.uses()]
        if not users or any(
            u.kind() != "prim::ListUnpack" or id(u) not in self._inside for u in users
        ):
            raise CaptureError("its list is taken as a whole")

    def _unpacked(self, node: Any) -> bool:
        """Name the tensors of a list that a captured operator makes."""
        call = self._nodes.get(node.input().unique())
        if call is None:
            return False
        for place, output in enumerate(node.outputs()):
            part = self._fx.create_node("call_function", operator.getitem, (call, place), {})
            part.meta["val"] = call.meta["val"][place]
            self.add(part)
            self._name(output, part, self.values[part])
        return True

    def _name(self, output: Any, node: fx.Node, value: Value) -> None:
        self._standing[output.unique()] = value
        self._nodes[output.unique()] = node
        self.sources.setdefault(value, output)

    def _given(self, value: Any, argument: Any) -> Any:
        """An argument of a captured operator: nodes for tensors and sizes, all else itself."""
        known = self._metas.of(value)
        maker = value.node()
        if maker.kind() == "prim::ListConstruct" and isinstance(known, list):
            return [self._given(each, argument) for each in maker.inputs()]
        if known is UNKNOWN:
            raise CaptureError(f"its {argument.name} is not known")
        if isinstance(known, Tensor | torch.SymInt):
            return self._node_of(value, known)
        if isinstance(known, list) and any(isinstance(x, Tensor | torch.SymInt) for x in known):
            raise CaptureError(f"its {argument.name} is a list that was made elsewhere")
        if type(known) is int and maker.kind() != "prim::Constant":
            return self._node_of(value, known)  # which varies, though not where this is used
        try:
            return as_given(known, argument)
        except ValueError as error:
            raise CaptureError(str(error)) from None

    def _node_of(self, value: Any, meta: Any) -> fx.Node:
        found = self._nodes.get(value.unique())
        if found is None:
            found = self._fx.create_node("placeholder", f"v{value.unique()}")
            found.meta["val"] = meta
            own = self._standing.get(value.unique())
            self.values[found] = self._value(value) if own is None else own
            self._nodes[value.unique()] = found
        return found

    def _value(self, value: Any) -> Value:
        """What stands for a value of the graph, which may be made before the stretch."""
        found = self._standing.get(value.unique())
        if found is not None:
            return found
        pending = self._lists.get(value.unique())
        if pending is not None:
            self._keep(pending)
            return self._standing[value.unique()]
        if value.node().kind() == "prim::Constant" and value.type().kind() == "TensorType":
            tensor = value.toIValue()
            if isinstance(self._metas.of(value), Tensor):
                made = self.constant(tensor)
                made.meta = tensor
                return self._named(value, made)
        made = self._new(value)
        self.steps.inputs.append(made)
        return self._named(value, made)

    def _new(self, value: Any) -> Value:
        known = self._metas.of(value)
        is_size = value.type().kind() == "IntType"
        return Value(is_size, known if isinstance(known, Tensor) else None)

    def _named(self, value: Any, own: Value) -> Value:
        self._standing[value.unique()] = own
        self.sources[own] = value
        return own

    def _keep(self, node: Any) -> None:
        """Write a node as a step that no pass knows."""
        taken = [self._value(each) for each in node.inputs() if not _is_plain_constant(each)]
        results = [self._new(each) for each in node.outputs()]
        for output, result in zip(node.outputs(), results, strict=True):
            self._named(output, result)
        step = Step(f"{KEPT}{len(self.kept)}:{node.kind()}", [self._moment, *taken], results)
        self.kept.append(node)
        self.steps.steps.append(step)

    def _end(self) -> None:
        """Note what others take."""
        for node in self.nodes:
            if node.kind() == "prim::Constant":
                continue
            for output in node.outputs():
                if any(id(use.user) not in self._inside for use in output.uses()):
                    self.taken_outside.append(output)
                    self.steps.outputs.append(self._value(output))
        self.steps.drop_unused()


def _is_plain_constant(value: Any) -> bool:
    return bool(value.node().kind() == "prim::Constant")


def _is_of_tensors(meta: Any) -> bool:
    if isinstance(meta, list | tuple):
        return all(isinstance(each, Tensor) for each in meta)
    return isinstance(meta, Tensor)


def number_of_kept(step: Step) -> int:
    """The number of the node that a step stands for."""
    return int(step.target.removeprefix(KEPT).partition(":")[0])
