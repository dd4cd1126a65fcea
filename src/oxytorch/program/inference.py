"""Dynamo's graphs of inference as steps, by one run of them on tensors without values.

torch's own tracing (AOTAutograd) runs a graph twice, for what writes and gradients need. A graph
that writes to none of its inputs, asks for no gradients and has known sizes needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ..core.watched import PLAIN
from ..graph.errors import CaptureError
from .calls import TensorRef as Recorded
from .capture import Given, Outputs, steps_of
from .in_place import without_writes
from .program import Steps, Value
from .recorded import Graph, forms_of
from .smaller import smaller_ones
from .tape import Recorder

_SWITCHES = (torch._C._set_grad_enabled, torch._C._functorch._vmap_increment_nesting)
"""Calls in a graph upon which its operators are others, or their results ask for gradients."""


def has_symbols(graph: fx.GraphModule) -> bool:
    """Whether sizes of a graph are not known: torch's resampling operators take no such sizes."""
    known = (node.meta.get("example_value") for node in graph.graph.nodes)
    return any(
        isinstance(value, torch.SymInt | torch.SymFloat)
        or (isinstance(value, Tensor) and any(type(size) is not int for size in value.shape))
        for value in known
    )


def can_trace(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph may be traced here: its results ask for no gradients, its sizes are known,
    and its inputs are plain tensors of the processor."""
    return (
        all(type(x) in PLAIN and x.device.type == "cpu" for x in example_inputs)
        and all(x.layout == torch.strided and not x.is_quantized for x in example_inputs)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in example_inputs))
        and not any(node.target in _SWITCHES for node in graph.graph.nodes)
        and not has_symbols(graph)
    )


@dataclass(frozen=True)
class Traced:
    """The steps of a graph, what its outputs are, and which inputs seldom change."""

    steps: Steps
    outputs: Outputs
    lasting: list[Value]


def traced_steps(graph: fx.GraphModule) -> Traced:
    """The steps of a graph that `can_trace` accepts. Raises CaptureError, and what a run raises."""
    places = graph.graph.find_nodes(op="placeholder")
    modes = {node.meta["example_value"].fake_mode for node in places}
    if len(modes) != 1:
        raise CaptureError("its inputs were traced in several ways, or none")
    (fake_mode,) = modes  # Dynamo's own: its tensors are as they were, unless a graph writes to one
    attributes = {node.target: None for node in graph.graph.find_nodes(op="get_attr")}
    held = [_attribute(graph, str(name)) for name in attributes]
    inputs = [node.meta["example_value"] for node in places]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held):
        raise CaptureError("a constant of its own asks for gradients")
    inputs += [fake_mode.from_tensor(tensor, static_shapes=True) for tensor in held]
    recorder = _Tracer(inputs, smaller_ones())
    run = _Run(graph, dict(zip(attributes, inputs[len(places) :], strict=True)))
    with torch.no_grad(), fake_mode, recorder:
        found = run.run(*inputs[: len(places)])
    tensors = [each for each in found if isinstance(each, Tensor)]
    if any(each is not None and not isinstance(each, Tensor | int) for each in found):
        raise CaptureError("an output is neither a tensor nor an integer")
    recording = without_writes(recorder.recording(tensors))
    if recording is None:
        raise CaptureError("it writes to tensors that it shows elsewhere")
    steps, made = steps_of(Graph(recording, forms_of(inputs)).graph)
    given = steps.inputs[: len(places)]
    steps.constants.update(
        zip(steps.inputs[len(places) :], [*held, *recording.externals], strict=True)
    )
    del steps.inputs[len(places) :]
    if any(isinstance(each, Given) and each.place >= len(places) for each in made):
        raise CaptureError("it returns a constant of its own")
    rest = iter(made)
    outputs: Outputs = [next(rest) if isinstance(each, Tensor) else each for each in found]
    is_lasting = [_is_lasting(node) and not steps.has_effect for node in places]
    return Traced(steps, outputs, [v for v, lasts in zip(given, is_lasting, strict=True) if lasts])


def _attribute(owner: Any, path: str) -> Tensor:
    for name in path.split("."):
        owner = getattr(owner, name)
    if type(owner) not in PLAIN:
        raise CaptureError(f"{path} is a {type(owner).__name__}")
    found: Tensor = owner
    return found


def _is_lasting(node: fx.Node) -> bool:
    """Whether an input is a parameter or buffer, by what Dynamo noted of it."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


class _Run(fx.Interpreter):
    """Runs a graph with other tensors in place of its own."""

    def __init__(self, graph: fx.GraphModule, attributes: dict[Any, Tensor]) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._attributes = attributes

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._attributes[target]


class _Tracer(Recorder):  # type: ignore[no-untyped-call]
    """Notes operators on tensors without values; smaller ones in place of those in a table."""

    def __init__(self, inputs: Sequence[Tensor], table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__(inputs)
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "prim":  # which asks a tensor for its device
            return func(*args, **(kwargs or {}))
        small = self._table.get(func)
        if small is not None:
            with self:
                found = small(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return super().__torch_dispatch__(func, types, args, kwargs)

    def value(self, tensor: Tensor) -> Recorded:
        found = self._values.get(id(tensor))
        if found is None:
            raise CaptureError("an operator takes a tensor that none has made")
        return found

    def _literal(self, tensor: Tensor, result: Tensor) -> None:
        with _disable_current_modes():  # under which it would have no values
            super()._literal(tensor, result)
