"""Steps as nodes of a TorchScript graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph.errors import CaptureError
from ..numbered import DTYPES, FORMATS, LAYOUTS
from ..program import Argument, Some, Step, Value
from ..words import operator_named, value_of
from .stretch import KEPT, Stretch, number_of_kept

_OWN_NAMES = {"add": "aten::add.Tensor"}
"""Steps of a program that are no operator's, and the operator."""
_WORDS = {
    f"={each}".replace("torch.", ""): number
    for kinds in (DTYPES, LAYOUTS, FORMATS)
    for number, each in enumerate(kinds)
}


class Writer:
    """Writes the steps of a stretch before a node, in place of the stretch's own nodes."""

    def __init__(self, graph: Any, stretch: Stretch, end: Any) -> None:
        self._graph = graph
        self._stretch = stretch
        self._end = end
        self._values: dict[Value, Any] = {}
        made = {value for step in stretch.steps.steps for value in step.results}
        inside = {id(node) for node in stretch.nodes}
        for value, source in stretch.sources.items():
            is_before = id(source.node()) not in inside or source.node().kind() == "prim::Constant"
            if value not in made and is_before:
                self._values[value] = source

    def write(self) -> None:
        """Write all steps, have others take their results, and remove the nodes."""
        steps = self._stretch.steps
        self._graph.setInsertPoint(self._end)
        for step in steps.steps:
            if step.target.startswith(KEPT):
                self._copy(step)
            else:
                self._call(step)
        for source, value in zip(self._stretch.taken_outside, steps.outputs, strict=True):
            source.replaceAllUsesWith(self._value(value))
        for node in reversed(self._stretch.nodes):
            if node.kind() != "prim::Constant":
                node.destroy()

    def _copy(self, step: Step) -> None:
        """A node as it was, of what its inputs are now."""
        node = self._stretch.kept[number_of_kept(step)]
        own = [each for each in node.inputs() if each.node().kind() != "prim::Constant"]
        now = {a.unique(): self._value(b) for a, b in zip(own, step.arguments[1:], strict=True)}
        made = self._graph.createClone(node, lambda value: now.get(value.unique(), value))
        made.insertBefore(self._end)
        for result, output in zip(step.results, made.outputs(), strict=True):
            if result is not None:
                self._values[result] = output

    def _call(self, step: Step) -> None:
        func = operator_named(_OWN_NAMES.get(step.target, step.target))
        if func is None:
            raise CaptureError(f"TorchScript has no {step.target}")
        schema = func._schema
        arguments = [
            self._argument(word, argument.type)
            for word, argument in zip(step.arguments, schema.arguments, strict=True)
        ]
        node = self._graph.create(schema.name, arguments, len(schema.returns))
        node.insertBefore(self._end)
        for output, returned in zip(node.outputs(), schema.returns, strict=True):
            output.setType(returned.type)
        outputs = [*node.outputs()]
        if step.returns_list:
            node = self._graph.create("prim::ListUnpack", outputs, len(step.results))
            node.insertBefore(self._end)
            outputs = [*node.outputs()]
            for output in outputs:
                output.setType(torch._C.TensorType.get())
        for result, output in zip(step.results, outputs, strict=True):
            if result is not None:
                self._values[result] = output

    def _value(self, value: Value) -> Any:
        found = self._values.get(value)
        if found is None:
            found = self._values[value] = self._insert(self._stretch.steps.constants[value])
        return found

    def _insert(self, constant: Any) -> Any:
        held = constant.detach() if isinstance(constant, Tensor) else constant
        return self._graph.insertConstant(held)

    def _argument(self, word: Argument, kind: Any) -> Any:
        if isinstance(word, Value):
            return self._value(word)
        if isinstance(word, Some):
            return self._argument(word.item, kind.getElementType())
        if isinstance(word, list | tuple):
            items = [self._argument(item, kind.getElementType()) for item in word]
            node = self._graph.create("prim::ListConstruct", items, 1)
            node.insertBefore(self._end)
            node.output().setType(kind)
            return node.output()
        while kind.kind() == "OptionalType" and word != "none":
            kind = kind.getElementType()
        return self._insert(_constant(str(word), kind.kind()))


def _constant(word: str, kind: str) -> Any:
    """What a program's word says, as TorchScript has it."""
    return _WORDS[word] if word in _WORDS else value_of(word, kind)
