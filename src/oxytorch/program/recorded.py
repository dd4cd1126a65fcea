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

from ..core.modes import own_code
from ..graph.errors import CaptureError
from ..graph.outputs import output_tensors
from ..graph.replay import UnreadyError, input_tensors
from ..graph.tape import Recorder, Recording, Step, Value, form_of, recorded, values_in
from .backend import WITH_NUMBERS
from .capture import RESAMPLING, Outputs, steps_of
from .in_place import without_writes
from .placed import Placed, UnsettledError
from .program import Steps, UnmetError

_aten = torch.ops.aten


class RecordedProgram:
    """The operators of a recorded run, fused, with the tensors from outside.

    inputs: the tensors of the call that was recorded. outputs: those of the module's own code.
    """

    def __init__(
        self, recording: Recording, inputs: list[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        graph = _Graph(without_writes(recording) or recording, inputs)
        steps, found, others = _steps(graph, [*inputs, *recording.externals])
        self._externals = [*recording.externals, *others]
        if steps.has_effect:
            raise CaptureError("its code draws random numbers")
        if any(isinstance(output, int) or output is None for output in found):
            raise CaptureError("a tensor of its output is none of its operators'")
        lasting = [*steps.inputs][len(inputs) :]
        count = len(found) - len(graph.required)
        self._placed = Placed(steps, found[:count], lasting, graph.required)
        self._forms = [form_of(tensor)[:3] for tensor in outputs]

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
        _, plain = run_once()  # unseen: torch's fast paths give other strides
        recording = recorded(run_once, inputs)
    if not recording.tensors:
        raise CaptureError("it returns no tensor")
    if any(tensor.requires_grad for tensor in recording.tensors):
        raise CaptureError("its code enables gradients")
    program = RecordedProgram(recording, inputs, plain)
    found = program(inputs)
    if found is None:
        raise CaptureError("a second run of its operators gives other values")
    if [form_of(own)[:3] for own in found] != [form_of(own)[:3] for own in plain]:
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
        self._taken = {v for step in recording.steps for v in values_in(step.arguments)}
        self._taken.update(recording.outputs)
        given = [("input", inputs), ("external", recording.externals)]
        for kind, tensors in given:
            for number, tensor in enumerate(tensors):
                value = Value(kind, number)
                node = self._graph.placeholder(f"{kind}_{number}")
                self._nodes[value] = self._with_meta(node, form_of(tensor).meta())
        read = [found for step in recording.steps if (found := self._add(step)) is not None]
        outputs = [self._nodes[value] for value in recording.outputs]
        self._graph.output((*outputs, *read))
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)
        self.writes = any(step.operator._schema.is_mutable for step in recording.steps)

    def _with_meta(self, node: fx.Node, meta: Tensor) -> fx.Node:
        node.meta["val"] = meta
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
        node.meta["val"] = [None if v is None else self._forms[v].meta() for v in results]
        for place, value in enumerate(results):
            if value in self._taken:
                part = self._graph.call_function(getitem, (node, place))
                self._name(value, part)
        return None

    def _name(self, value: Value, node: fx.Node) -> None:
        self._nodes[value] = self._with_meta(node, self._forms[value].meta())

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
            copy = self._graph.call_function(_aten.clone.default, (tensor,))
            return self._with_meta(copy, meta)
        shape = tuple(tensor.meta["val"].shape)
        if tensor is other or shape != tuple(other.meta["val"].shape):
            raise CaptureError("its code compares a tensor with itself or one of another shape")
        self.required.append(torch.tensor(step.read))
        same = self._graph.call_function(_aten.eq.Tensor, (tensor, other))
        self._with_meta(same, torch.empty(shape, dtype=torch.bool, device="meta"))
        found = self._graph.call_function(_aten.all.default, (same,))
        return self._with_meta(found, torch.empty((), dtype=torch.bool, device="meta"))


def _steps(graph: _Graph, tensors: list[Tensor]) -> tuple[Steps, Outputs, list[Tensor]]:
    """The steps of a graph of such tensors; where it is needed of one without writes, or of smaller
    operators. Also the tensors that these take besides, which are its last inputs."""
    reasons: list[CaptureError] = []
    if not graph.writes:
        try:
            return *steps_of(graph.module), []
        except CaptureError as error:
            reasons.append(error)
    known = (*WITH_NUMBERS, *RESAMPLING)
    for table in (
        get_decompositions(known),
        {**core_aten_decompositions(), **get_decompositions(known)},
    ):
        try:
            recording = _rewritten(graph.module, tensors, table)
            return *steps_of(_Graph(recording, tensors).module), recording.externals
        except CaptureError as error:
            reasons.append(error)
    raise reasons[0]


class _Rewriter(Recorder):  # type: ignore[no-untyped-call]
    """Notes smaller operators in place of those in a table."""

    def __init__(self, inputs: Sequence[Tensor], table: Any) -> None:
        super().__init__(inputs)
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        smaller = self._table.get(func)
        if smaller is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return smaller(*args, **(kwargs or {}))


def _rewritten(module: fx.GraphModule, tensors: list[Tensor], table: Any) -> Recording:
    """A run of a graph whose operators write to no tensor, without those of the table."""
    functional = torch.func.functionalize(module, remove="mutations")
    recorder = _Rewriter(tensors, table)
    with torch.no_grad(), recorder:
        found = [*functional(*tensors)]
    outputs = [recorder.value(tensor) for tensor in found]
    return Recording(recorder.steps, recorder.externals, outputs, found, found, recorder.forms)


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
