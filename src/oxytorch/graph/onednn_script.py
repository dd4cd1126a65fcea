"""Recorded steps as a function of TorchScript, which is what hands graphs to oneDNN's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import CaptureError
from .tape import Step, Value

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""The numbers that TorchScript knows them by (c10/core/MemoryFormat.h)."""


def scripted(
    steps: list[Step], inputs: int, externals: list[Tensor], outputs: list[Value]
) -> Callable[..., list[Tensor]]:
    """The function of so many input tensors that returns the outputs.

    externals: the tensors from outside, which the function holds as constants. No step reads a
    value. Raises CaptureError where TorchScript has no form of an argument.
    """
    writer = _Writer(inputs, externals)
    for step in steps:
        writer.add(step)
    return writer.function(outputs)


class _Writer:
    def __init__(self, inputs: int, externals: list[Tensor]) -> None:
        self._graph: Any = torch._C.Graph()
        self._externals = externals
        self._nodes: dict[Value, Any] = {}
        for number in range(inputs):
            node = self._nodes[Value("input", number)] = self._graph.addInput()
            node.setType(torch._C.TensorType.get())

    def add(self, step: Step) -> None:
        schema = step.operator._schema
        arguments = [
            self._argument(value, argument.type)
            for value, argument in zip(step.arguments, schema.arguments, strict=True)
        ]
        node = self._appended(schema.name, arguments, len(schema.returns))
        for output, result, returned in zip(
            node.outputs(), step.results, schema.returns, strict=True
        ):
            output.setType(returned.type)
            if isinstance(result, Value):
                self._nodes[result] = output
            elif isinstance(result, list):
                parts = self._appended("prim::ListUnpack", [output], len(result)).outputs()
                for part, value in zip(parts, result, strict=True):
                    part.setType(torch._C.TensorType.get())
                    self._nodes[value] = part

    def _appended(self, kind: str, arguments: list[Any], results: int = 1) -> Any:
        node = self._graph.create(kind, arguments, results)
        self._graph.appendNode(node)
        return node

    def _argument(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Value):
            return self._tensor(value)
        if isinstance(value, tuple):
            while kind.kind() == "OptionalType":
                kind = kind.getElementType()
            return self._list([self._argument(item, kind.getElementType()) for item in value], kind)
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        try:
            return self._graph.insertConstant(value)
        except (RuntimeError, TypeError) as error:
            raise CaptureError(f"an operator's argument {value!r} has no constant form") from error

    def _list(self, items: list[Any], kind: Any) -> Any:
        made = self._appended("prim::ListConstruct", items).output()
        made.setType(kind)
        return made

    def _tensor(self, value: Value) -> Any:
        if value not in self._nodes:
            held = self._externals[value.number].detach()
            self._nodes[value] = self._graph.insertConstant(held)
        return self._nodes[value]

    def function(self, outputs: list[Value]) -> Callable[..., list[Tensor]]:
        kind = torch._C.ListType(torch._C.TensorType.get())
        self._graph.registerOutput(self._list([self._tensor(v) for v in outputs], kind))
        torch._C._jit_pass_constant_propagation(self._graph)
        made: Callable[..., list[Tensor]] = torch._C._create_function_from_graph(
            "steps", self._graph
        )
        return made
