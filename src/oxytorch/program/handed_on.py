"""Fused graphs for another backend of `torch.compile`: steps as a graph of torch.fx again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.errors import CaptureError
from .capture import Given, Outputs, steps_of
from .passes import improve
from .program import Argument, Some, Step, Steps, Value
from .smaller import smaller_ones
from .words import operator_named, value_of

_aten = torch.ops.aten

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "<": torch.sym_min,
    ">": torch.sym_max,
}


def hand_on(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    then: Any,
    say_why: Callable[[fx.GraphModule, Exception], None],
) -> Callable[..., Any]:
    """What another backend makes of Dynamo's graph, fused by the passes that hold for all weights.

    then: a backend, or its name.
    say_why: told of graphs that are handed on as they are.
    """
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import lookup_backend

    backend: Any = lookup_backend(then)

    def compiled(own: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        try:
            given = fused(own)
        except CaptureError as error:
            say_why(own, error)
            given = own
        # A context of its own: the other backend traces it again, and notes there what it finds.
        with tracing(TracingContext(detect_fake_mode(inputs))), torch.no_grad():
            return make_boxed_func(backend(given, inputs))

    found: Callable[..., Any] = aot_autograd(
        fw_compiler=compiled, decompositions=smaller_ones(handed_on=True)
    )(graph, example_inputs)
    return found


def fused(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of operators with those that the passes join. Raises CaptureError where a program
    cannot hold it."""
    steps, outputs = steps_of(graph.graph, graph)
    if steps.has_effect:
        raise CaptureError("it writes to a tensor or draws random numbers")
    with _disable_current_modes():  # under which constants could not be read
        improve(steps, (), layouts=False, handed_on=True)
        return _Writer(steps).written(outputs)


class _Writer:
    """Writes steps as nodes."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._graph = fx.Graph()
        self._owner = nn.Module()
        self._nodes: dict[Value, Any] = {}

    def written(self, outputs: Outputs) -> fx.GraphModule:
        """The graph. outputs: what its outputs are, in order."""
        places = [self._graph.placeholder(f"input_{n}") for n in range(len(self._steps.inputs))]
        self._nodes.update(zip(self._steps.inputs, places, strict=True))
        for number, (value, tensor) in enumerate(self._steps.constants.items()):
            name = f"constant_{number}"
            self._owner.register_buffer(name, tensor.detach())
            self._nodes[value] = self._graph.get_attr(name)
        for step in self._steps.steps:
            self._add(step)
        found = [
            places[output.place]
            if isinstance(output, Given)
            else self._nodes[output]
            if isinstance(output, Value)
            else output
            for output in outputs
        ]
        self._graph.output(tuple(found))
        return fx.GraphModule(self._owner, self._graph)

    def _add(self, step: Step) -> None:
        call, (first, *rest) = self._graph.call_function, step.arguments or ("none",)
        if step.target == "size":
            made = call(_aten.sym_size.int, (self._given(first, "IntType"), int(rest[0])))
        elif step.target in _ARITHMETIC:
            sizes = tuple(self._given(each, "IntType") for each in step.arguments)
            made = call(_ARITHMETIC[step.target], sizes)
        elif step.target == "add":
            pair = tuple(self._given(each, "") for each in step.arguments[:2])
            made = call(_aten.add.Tensor, pair, {"alpha": float(str(rest[1]))})
        elif step.target == "resample":
            made = self._resampled(*step.arguments)
        else:
            made = self._called(step)
        if len(step.results) == 1 and not step.returns_list:
            results = [made]
        else:
            results = [call(operator.getitem, (made, n)) for n in range(len(step.results))]
        self._nodes.update(
            (value, node) for value, node in zip(step.results, results, strict=True) if value
        )

    def _resampled(self, x: Any, name: Any, sizes: Any, align: Any) -> fx.Node:
        func = getattr(_aten, name.strip('"')).vec
        found = [self._given(each, "IntType") for each in sizes]
        aligns = [] if align == "none" else [align == "true"]
        return self._graph.call_function(func, (self._nodes[x], found, *aligns, None))

    def _called(self, step: Step) -> fx.Node:
        func = operator_named(step.target)
        if func is None:
            raise CaptureError(f"torch has no {step.target}")
        arguments = func._schema.arguments
        pairs = [*zip(arguments, step.arguments, strict=True)]
        args = tuple(self._of(word, a.type) for a, word in pairs if not a.kwarg_only)
        kwargs = {a.name: self._of(word, a.type) for a, word in pairs if a.kwarg_only}
        return self._graph.call_function(func, args, kwargs)

    def _of(self, word: Argument, kind: Any) -> Any:
        """An argument of a type of the schema."""
        if isinstance(word, Some):
            return self._of(word.item, kind.getElementType())
        if isinstance(word, list | tuple):
            return [self._of(item, kind.getElementType()) for item in word]
        while kind.kind() == "OptionalType" and word != "none":
            kind = kind.getElementType()
        return self._given(word, kind.kind())

    def _given(self, word: Argument, kind: str) -> Any:
        return self._nodes[word] if isinstance(word, Value) else value_of(str(word), kind)
