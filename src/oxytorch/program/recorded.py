"""Recorded runs of a module as programs.

A program holds for calls of the form that was recorded, which whoever calls it has seen to. Where
the module's code read the value of a tensor, the program ends unless it is the recorded one.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.errors import CaptureError, UnfitError
from .calls import Form, OperatorCall, Recording, TensorRef, as_given_to, form_of, values_in
from .capture import Outputs, steps_of
from .in_place import without_writes
from .passes.quantized_layers import Quantized
from .placed import Placed
from .program import Program, Steps, UnmetError
from .sized import Computed, Formula, Rounded, Sized
from .sizes import SizedRun
from .smaller import with_smaller_ones
from .symbols import Symbols
from .tape import Recorder

_aten = torch.ops.aten
_ARITHMETIC: dict[str, Any] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
    "%": operator.mod, "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip


OutputForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The shape, the strides and the dtype of a tensor."""


class RecordedProgram:
    """A program for calls of one form.

    externals: the tensors that it takes besides those of the call.
    outputs: the forms of those of the module's own code.
    """

    def __init__(
        self, placed: Placed, externals: Sequence[Tensor], outputs: Sequence[OutputForm]
    ) -> None:
        self._externals = externals
        self._placed = placed
        self._forms = outputs

    def __str__(self) -> str:
        return str(self._placed.program)

    @property
    def left_out(self) -> list[str]:
        """The passes that failed, and why."""
        return self._placed.left_out

    def runs(self, placed: Placed) -> bool:
        """Whether it runs the steps of a program."""
        return self._placed is placed

    def is_of(self, other: RecordedProgram) -> bool:
        """Whether another one runs the same steps."""
        return self._placed is other._placed

    def first_call(self, tensors: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        """Make what lasts, and run; what a call returns, and the seconds that it took without that:
        more than a later one takes."""
        self._placed.make([*tensors, *self._externals])
        began = time.perf_counter()
        return self(tensors), time.perf_counter() - began

    def __call__(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Run on the tensors of a call; None where a value that was read is another one.

        Raises UnsettledError.
        """
        try:
            found = self._placed([*tensors, *self._externals])
        except UnmetError:
            return None
        return [*map(_in_order, found, self._forms)]


class Run:
    """A recorded run, in operators that a program can hold.

    quantized: the layers that are to multiply bytes.
    count: the number of tensors of the call.
    recordings: the run as it was and, once `reduce` was called and where a program needs them, in
        smaller operators.
    forms: for each of these, the forms of the tensors that its inputs stand for.
    externals: the tensors that a program of it takes besides those of the call.
    """

    def __init__(
        self,
        recording: Recording,
        inputs: list[Tensor],
        quantized: Quantized | None = None,
    ) -> None:
        self.count = len(inputs)
        self._quantized = quantized
        first = replace(without_writes(recording) or recording, tensors=[], output=None)
        self.recordings = [first]
        self.forms = [forms_of(inputs)]
        self.externals = first.externals
        self._tensors = [*inputs, *first.externals]
        self._steps: Steps | None = None
        self._outputs: Outputs = []
        self._required: list[Tensor] = []

    @property
    def images(self) -> list[tuple[int, ...]]:
        """The sizes of what layers take that may be packed for it, without the batch."""
        run = self.recordings[0]
        given = {TensorRef("input", number): form for number, form in enumerate(self.forms[0])}
        forms = {**given, **run.forms}
        return [
            forms[s.arguments[0]].shape[1:]
            for s in run.steps
            if s.operator is _aten.convolution.default and s.arguments[0] in forms
        ]

    def reduce(self) -> None:
        """Write it as steps of a program. Raises CaptureError."""
        if self._steps is None:
            self._steps, self._outputs = self._written()
            self._tensors = []

    def written(self) -> tuple[Steps, list[Tensor]]:
        """The steps, and what the last of their outputs, which the code read, must be. Raises
        CaptureError."""
        self.reduce()
        assert self._steps is not None
        return self._steps.copy(), self._required

    def placed(self) -> Placed:
        """A program of it, for calls of its form. Raises CaptureError."""
        self.reduce()
        assert self._steps is not None
        return self._improved(self._steps, self._outputs)

    def sized(self, sized: SizedRun, symbols: Symbols) -> Placed:
        """A program of all runs that `sized` stands for, of which it is one."""
        graph = Graph(sized.recording, sized.inputs, symbols, sized.places)
        return self._improved(*steps_of(graph.graph))

    def _improved(self, steps: Steps, found: Outputs) -> Placed:
        if steps.has_effect:
            raise CaptureError("its code draws random numbers")
        if any(isinstance(output, int) or output is None for output in found):
            raise CaptureError("a tensor of its output is none of its operators'")
        count = len(found) - len(self._required)
        lasting = [*steps.inputs][self.count :]
        quantized = self._quantized
        quantization = None if quantized is None else quantized.of(lasting, self.externals)
        return Placed(steps, found[:count], lasting, self._required, quantization)

    def _written(self) -> tuple[Steps, Outputs]:
        """The steps; where it is needed of a run without writes, or of smaller operators."""
        (first,) = self.recordings
        graph = Graph(first, self.forms[0])
        self._required = graph.required
        if not graph.writes:
            with suppress(UnfitError):
                return steps_of(graph.graph)

        def written(table: Any) -> tuple[Recording, tuple[Steps, Outputs]]:
            module = fx.GraphModule(torch.nn.Module(), graph.graph)
            smaller = _rewritten(module, self._tensors, table)
            return smaller, steps_of(Graph(smaller, forms_of(self._tensors)).graph)

        smaller, found = with_smaller_ones(written)
        self.recordings.append(smaller)
        self.forms.append(forms_of(self._tensors))
        self.externals = [*first.externals, *smaller.externals]
        return found


def forms_of(tensors: Sequence[Tensor]) -> tuple[Form, ...]:
    """The forms of tensors, whichever memory they have."""
    return tuple(form_of(tensor)._replace(memory=0) for tensor in tensors)


class Graph:
    """A recording as a graph of torch.fx.

    inputs: the forms of the tensors that its inputs stand for.
    symbols: the sizes that formulas in it are of; places: for each of them the number of an input,
        and the dimension that has it.

    graph: its placeholders are the inputs and the tensors from outside; its outputs those of the
        recording, and then what was read.
    required: the values that were read.
    writes: whether an operator writes to a tensor.
    """

    def __init__(
        self,
        recording: Recording,
        inputs: Sequence[Form],
        symbols: Symbols | None = None,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.required: list[Tensor] = []
        self.graph = fx.Graph()
        self._nodes: dict[TensorRef, fx.Node] = {}
        self._numbers: dict[Sized, fx.Node] = {}
        self._forms, self._symbols, self._places = recording.forms, symbols, places
        self._taken = {v for step in recording.steps for v in values_in(step.arguments)}
        self._taken.update(recording.outputs)
        given = [("input", inputs), ("external", forms_of(recording.externals))]
        for kind, forms in given:
            for number, form in enumerate(forms):
                node = self.graph.placeholder(f"{kind}_{number}")
                self._nodes[TensorRef(kind, number)] = self._with_meta(node, self._meta(form))
        read = [found for step in recording.steps if (found := self._add(step)) is not None]
        outputs = [self._nodes[value] for value in recording.outputs]
        self.graph.output((*outputs, *read))
        self.writes = any(step.operator._schema.is_mutable for step in recording.steps)

    def _meta(self, form: Form) -> Tensor:
        return form.meta() if self._symbols is None else self._symbols.meta(form)

    def _with_meta(self, node: fx.Node, meta: Tensor) -> fx.Node:
        node.meta["val"] = meta
        return node

    def _add(self, step: OperatorCall) -> fx.Node | None:
        """Add a step; what it reads, if it reads a value."""
        arguments = [self._argument(each) for each in step.arguments]
        if step.read is not None:
            return self._read(step, *arguments)
        node = self.graph.call_function(step.operator, *as_given_to(step.operator, arguments))
        returns = step.operator._schema.returns
        if len(returns) == 1 and isinstance(step.results[0], TensorRef):
            self._name(step.results[0], node)
            return None
        results: Any = step.results[0] if len(returns) == 1 else step.results
        node.meta["val"] = [None if v is None else self._meta(self._forms[v]) for v in results]
        for place, value in enumerate(results):
            if value in self._taken:
                part = self.graph.call_function(operator.getitem, (node, place))
                self._name(value, part)
        return None

    def _name(self, value: TensorRef, node: fx.Node) -> None:
        self._nodes[value] = self._with_meta(node, self._meta(self._forms[value]))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return self._nodes[value]
        if isinstance(value, Sized):
            return self._number(value)
        return [self._argument(item) for item in value] if isinstance(value, tuple) else value

    def _number(self, number: Sized) -> fx.Node:
        """What computes a number from the sizes of inputs."""
        found = self._numbers.get(number)
        if found is None:
            if isinstance(number, Rounded):
                found = self._with(operator.add, self._number(number.formula), number.rest, 0)
                found = self._with(operator.floordiv, found, number.divisor, 1)
            elif isinstance(number, Formula):
                found, *others = map(self._extent, number.sizes)
                for other in others:
                    found = self.graph.call_function(operator.mul, (found, other))
                found = self._with(operator.mul, found, number.factor, 1)
                found = self._with(operator.add, found, number.rest, 0)
            else:
                assert isinstance(number, Computed)
                found = self._computed(number.data)
            assert self._symbols is not None
            found.meta["val"] = self._symbols.value(number)
            self._numbers[number] = found
        return found

    def _computed(self, data: Any) -> Any:
        """What computes an operand of a condition."""
        if not isinstance(data, list):
            return data
        name, *operands = data
        if name == "value":
            return self._extent(operands[0])
        if name not in _ARITHMETIC:
            raise CaptureError(f"a program computes no {name} of sizes")
        return self.graph.call_function(_ARITHMETIC[name], (*map(self._computed, operands),))

    def _extent(self, size: int | Rounded) -> fx.Node:
        if isinstance(size, Rounded):
            return self._number(size)
        number, dim = self._places[size]
        given = self._nodes[TensorRef("input", number)], dim
        return self.graph.call_function(_aten.sym_size.int, given)

    def _with(self, function: Any, node: fx.Node, number: int, neutral: int) -> fx.Node:
        return node if number == neutral else self.graph.call_function(function, (node, number))

    def _read(self, step: OperatorCall, tensor: fx.Node, other: fx.Node | None = None) -> fx.Node:
        """A tensor that holds what a step read, as it was then."""
        if other is None:
            meta = tensor.meta["val"]
            if type(step.read) is bool and meta.dtype != torch.bool:
                raise CaptureError("its code asks whether a number is zero")
            self.required.append(torch.full(meta.shape, step.read, dtype=meta.dtype, device="cpu"))
            copy = self.graph.call_function(_aten.clone.default, (tensor,))
            return self._with_meta(copy, meta)
        shape = tuple(tensor.meta["val"].shape)
        if tensor is other or shape != tuple(other.meta["val"].shape):
            raise CaptureError("its code compares a tensor with itself or one of another shape")
        self.required.append(torch.tensor(step.read, device="cpu"))
        same = self.graph.call_function(_aten.eq.Tensor, (tensor, other))
        self._with_meta(same, torch.empty(shape, dtype=torch.bool, device="meta"))
        found = self.graph.call_function(_aten.all.default, (same,))
        return self._with_meta(found, torch.empty((), dtype=torch.bool, device="meta"))


def repeated(recording: Recording, inputs: Sequence[Tensor]) -> Program:
    """A program of these inputs that does what a run did once more, writes to tensors included.

    It holds the tensors from outside; what is written to them later on is seen. Raises CaptureError
    where the code reads values, or returns what is none of its operators' results.
    """
    graph = Graph(recording, forms_of(inputs))
    if graph.required:
        raise CaptureError("its code reads values of tensors")
    steps, outputs = steps_of(graph.graph)
    if len(steps.outputs) < len(outputs):
        raise CaptureError("a tensor of its output is none of its operators'")
    held = [tensor.detach() for tensor in recording.externals]
    steps.constants.update(zip(steps.inputs[len(inputs) :], held, strict=True))
    del steps.inputs[len(inputs) :]
    steps.drop_unused()
    return steps.program()


class _Rewriter(Recorder):  # type: ignore[no-untyped-call]
    """Notes smaller operators in place of those in a table."""

    def __init__(self, inputs: Sequence[Tensor], table: Any) -> None:
        super().__init__(inputs)
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        small = self._table.get(func)
        if func is _aten.view.default and not _can_be_viewed(*args):
            small = torch.reshape  # what makes the tensor has another order in smaller operators
        if small is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            found = small(*args, **(kwargs or {}))
        return (
            super().__torch_dispatch__(func, types, args, kwargs)
            if found is NotImplemented
            else found
        )


def _can_be_viewed(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor can have a shape without a copy."""
    try:
        form_of(tensor).meta().view(shape)
    except RuntimeError:
        return False
    return True


def _rewritten(module: fx.GraphModule, tensors: list[Tensor], table: Any) -> Recording:
    """A run of a graph whose operators write to no tensor, without those of the table."""
    functional = torch.func.functionalize(module, remove="mutations")
    recorder = _Rewriter(tensors, table)
    with torch.no_grad(), recorder:
        found = [*functional(*tensors)]
    recording = recorder.recording(found, found)
    return replace(recording, literals={*range(len(recording.externals))})


def _in_order(tensor: Tensor, form: tuple[Any, ...]) -> Tensor:
    """The tensor with the strides that the module's own has."""
    shape, stride, dtype = form
    if tensor.stride() == stride or tensor.shape != shape or tensor.dtype != dtype:
        return tensor
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(tensor)
