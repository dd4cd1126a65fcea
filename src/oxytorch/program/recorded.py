"""One recorded run of a module as a program.

It holds for calls of the form that was recorded, which whoever calls it has seen to. Where the
module's code read the value of a tensor, the program ends unless it is the recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from ..core.modes import own_code
from ..graph.errors import CaptureError
from ..graph.outputs import output_tensors
from ..graph.replay import UnreadyError, input_tensors
from ..graph.tape import Recording, Step, Value, recorded
from .backend import WITH_NUMBERS
from .capture import RESAMPLING, Outputs, steps_of
from .placed import Placed, UnsettledError
from .program import Steps, UnmetError

_aten = torch.ops.aten


class RecordedProgram:
    """The operators of a recorded run, fused, with the tensors from outside.

    inputs: the tensors of the call that was recorded.
    """

    def __init__(self, recording: Recording, inputs: list[Tensor]) -> None:
        self._externals = recording.externals
        graph = _Graph(recording, inputs)
        steps, outputs = _steps(graph.module, [*inputs, *recording.externals], graph.writes)
        if steps.has_effect:
            raise CaptureError("its code draws random numbers")
        if any(isinstance(output, int) or output is None for output in outputs):
            raise CaptureError("a tensor of its output is none of its operators'")
        lasting = [*steps.inputs][len(inputs) :]
        count = len(outputs) - len(graph.required)
        self._placed = Placed(steps, outputs[:count], lasting, graph.required)
        self._forms = [_form(tensor) for tensor in recording.tensors]

    def __str__(self) -> str:
        return str(self._placed.program)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Run on the tensors of a call; None where a value that was read is another one."""
        try:
            found = self._placed([*tensors, *self._externals])
        except UnmetError:
            return None
        except UnsettledError:
            raise UnreadyError from None
        return [*map(_in_order, found, self._forms)]


def build(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[RecordedProgram, Any]:
    """Record a call of `forward` (a `graph.replay.Builder`): the program and the call's output."""
    inputs = input_tensors(args, kwargs)

    def run_once() -> tuple[Any, list[Tensor]]:
        output = forward(*args, **kwargs)
        return output, output_tensors(output)

    with own_code():
        recording = recorded(run_once, inputs)
    if not recording.tensors:
        raise CaptureError("it returns no tensor")
    program = RecordedProgram(recording, inputs)
    found = program(inputs)
    if found is None:
        raise CaptureError("a second run of its operators gives other values")
    if [*map(_form, found)] != [*map(_form, recording.tensors)]:
        raise CaptureError("the program gives tensors of another form")
    return program, recording.output


class _Graph:
    """A recording as a graph of torch.fx.

    module: its placeholders are the inputs and the tensors from outside; its outputs those of the
    recording, and then what was read. required: the values that were read. writes: whether an
    operator writes to a tensor.
    """

    def __init__(self, recording: Recording, inputs: list[Tensor]) -> None:
        self.required: list[Tensor] = []
        self._graph = fx.Graph()
        self._nodes: dict[Value, fx.Node] = {}
        self._forms = recording.forms
        given = [("input", inputs), ("external", recording.externals)]
        for kind, tensors in given:
            for number, tensor in enumerate(tensors):
                value = Value(kind, number)
                node = self._graph.placeholder(f"{kind}_{number}")
                self._nodes[value] = self._with_meta(node, _form(tensor))
        read = [found for step in recording.steps if (found := self._add(step)) is not None]
        outputs = [self._nodes[value] for value in recording.outputs]
        self._graph.output((*outputs, *read))
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)
        self.writes = any(step.operator._schema.is_mutable for step in recording.steps)

    def _with_meta(self, node: fx.Node, form: tuple[Any, ...]) -> fx.Node:
        shape, stride, dtype = form
        node.meta["val"] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return node

    def _add(self, step: Step) -> fx.Node | None:
        """Add a step; what it reads, if it reads a value."""
        arguments = [self._argument(each) for each in step.arguments]
        if step.read is not None:
            return self._read(step, *arguments)
        node = self._graph.call_function(step.operator, *_given(step.operator, arguments))
        returns = step.operator._schema.returns
        if len(returns) == 1 and isinstance(step.results[0], Value):
            self._name(step.results[0], node)
            return None
        results: Any = step.results[0] if len(returns) == 1 else step.results
        node.meta["val"] = [None if each is None else self._meta(each) for each in results]
        for place, value in enumerate(results):
            if value is not None:
                part = self._graph.call_function(getitem, (node, place))
                self._name(value, part)
        return None

    def _name(self, value: Value, node: fx.Node) -> None:
        self._nodes[value] = self._with_meta(node, self._forms[value])

    def _meta(self, value: Value) -> Tensor:
        shape, stride, dtype = self._forms[value]
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Value):
            return self._nodes[value]
        return [self._argument(item) for item in value] if isinstance(value, tuple) else value

    def _read(self, step: Step, tensor: fx.Node, other: fx.Node | None = None) -> fx.Node:
        """A tensor that holds what a step read, as it was then."""
        if other is None:
            meta = tensor.meta["val"]
            if type(step.read) is bool and meta.dtype != torch.bool:
                raise CaptureError("its code asks whether a number is zero")
            self.required.append(torch.full(meta.shape, step.read, dtype=meta.dtype))
            form = tuple(meta.shape), meta.stride(), meta.dtype
            return self._with_meta(self._graph.call_function(_aten.clone.default, (tensor,)), form)
        shape = tuple(tensor.meta["val"].shape)
        if tensor is other or shape != tuple(other.meta["val"].shape):
            raise CaptureError("its code compares a tensor with itself or one of another shape")
        stride = torch.empty(shape, device="meta").stride()
        same = self._graph.call_function(_aten.eq.Tensor, (tensor, other))
        self._with_meta(same, (shape, stride, torch.bool))
        self.required.append(torch.tensor(step.read))
        found = self._graph.call_function(_aten.all.default, (same,))
        return self._with_meta(found, ((), (), torch.bool))


def _steps(
    module: fx.GraphModule, tensors: Sequence[Tensor], writes: bool
) -> tuple[Steps, Outputs]:
    """The steps of a graph; where it is needed of one without writes, or of smaller operators."""
    known = (*WITH_NUMBERS, *RESAMPLING)
    tables = (
        *(() if writes else (None,)),
        get_decompositions(known),
        {**core_aten_decompositions(), **get_decompositions(known)},
    )
    reasons: list[CaptureError] = []
    for table in tables:
        try:
            return steps_of(module if table is None else _retraced(module, tensors, table))
        except CaptureError as error:
            reasons.append(error)
    raise reasons[0]


def _retraced(module: fx.GraphModule, tensors: Sequence[Tensor], table: Any) -> fx.GraphModule:
    """A graph whose operators write to no tensor, without those of the table."""
    functional = torch.func.functionalize(module, remove="mutations")
    made = make_fx(functional, decomposition_table=table, tracing_mode="fake")
    with torch.no_grad():
        found: fx.GraphModule = made(*(t.detach() for t in tensors))
    found.graph.eliminate_dead_code()
    return found


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _in_order(tensor: Tensor, form: tuple[Any, ...]) -> Tensor:
    """The tensor with the strides that the module's own has."""
    shape, stride, dtype = form
    if tensor.stride() == stride or tensor.shape != shape or tensor.dtype != dtype:
        return tensor
    return torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor)


def _given(operator: Any, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in the order of the schema as positional and keyword ones."""
    pairs = [*zip(operator._schema.arguments, arguments, strict=True)]
    return (
        tuple(value for argument, value in pairs if not argument.kwarg_only),
        {argument.name: value for argument, value in pairs if argument.kwarg_only},
    )
