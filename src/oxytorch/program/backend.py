"""`torch.compile(model, backend="oxytorch")`: graphs of Dynamo as programs.

No compiler is run. A graph that a program cannot hold runs as torch's own operators, called from
Python.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._guards import TracingContext

from .. import _garbage
from ..core.interruption import pass_on_interruption
from ..graph.errors import CaptureError
from .capture import Outputs, steps_of
from .handed_on import hand_on
from .inference import can_trace, has_symbols, traced_steps
from .other_operators import RESAMPLING
from .placed import Placed, UnsettledError
from .program import Program, Steps, Value
from .smaller import smaller_ones

_log = logging.getLogger(__name__)
_aten = torch.ops.aten


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **ignored: Any,
) -> Callable[..., Any]:
    """The backend: a function that computes what Dynamo's graph computes.

    options: `{"then": backend}` hands the fused graph on to another backend, by its name or as a
        function.
    ignored: `mode` of `torch.compile` and other options, which are for other backends.
    """
    rest = {**(options or {})}
    then = rest.pop("then", None)
    if ignored or rest:
        named = " and ".join([*ignored, *(f"option {name}" for name in rest)])
        warnings.warn(f"backend='oxytorch' takes no {named}: ignored", stacklevel=2)
    with _garbage.paused():
        if then is not None:
            return hand_on(graph, example_inputs, then, _say_why)
        return _of_inference(graph, example_inputs) or _by_torch(graph, example_inputs)


def _of_inference(
    graph: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any] | None:
    """A program of a graph that needs nothing of torch's own tracing, which takes five times as
    long; None of others."""
    if not can_trace(graph, example_inputs):
        return None
    try:
        with _own_resampling():
            traced = traced_steps(graph)
        call = CompiledGraph(graph, traced.steps, traced.outputs, traced.lasting)
    except Exception as error:  # torch's tracing says in its own words what is wrong
        pass_on_interruption(error)
        _log.info("a graph of %d nodes is traced by torch: %s", len(graph.graph.nodes), error)
        return None
    off: Any = torch._dynamo.disable
    run: Callable[..., Any] = off(call, reason="a program is no Python")
    return run


def _by_torch(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What torch's tracing makes of a graph: programs without and with gradients."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=partial(_compiled, is_inference=False),
        inference_compiler=partial(_compiled, is_inference=True),
        decompositions=smaller_ones(),
    )
    with nullcontext() if has_symbols(graph) else _own_resampling():
        found: Callable[..., Any] = backend(graph, example_inputs)
    return found


@contextmanager
def _own_resampling() -> Iterator[None]:
    """While torch traces its resampling operators as such.

    It has Python code for them, of many small operators, which a compiler would join again.
    """
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    before = [(operator, dict(operator.py_kernels)) for operator in RESAMPLING]
    try:
        for operator in RESAMPLING:
            for key in keys:
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _compiled(
    graph: fx.GraphModule, example_inputs: Sequence[Any], is_inference: bool
) -> Callable[..., Any]:
    """A graph of operators as a program, or itself."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    is_elsewhere = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in example_inputs)
    try:
        if is_elsewhere:
            raise CaptureError("its tensors are not on the processor")
        steps, outputs = steps_of(graph.graph, graph)
        run: Callable[..., Any] = CompiledGraph(
            graph, steps, outputs, _lasting(steps, is_inference)
        )
    except CaptureError as error:
        _say_why(graph, error)
        run = graph.forward
    return make_boxed_func(run)  # type: ignore[no-any-return]


def _lasting(steps: Steps, is_inference: bool) -> list[Value]:
    """The inputs that are parameters and buffers, where these are not being trained."""
    context = TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    if not is_inference or facts is None or steps.has_effect:
        return []  # one of them may be written to
    places = {*(facts.static_input_indices or ())}
    values = [v for place, v in enumerate(steps.inputs) if place in places]
    return [value for value in values if not value.is_size]


def _say_why(graph: fx.GraphModule, why: Exception) -> None:
    _log.info("a graph of %d nodes stays Python: %s", len(graph.graph.nodes), why)


class CompiledGraph:
    """Calls a program in place of a graph.

    lasting: the inputs that seldom change; what is made of these alone is made once.

    What fails runs again as torch's own operators, which say what is wrong in their own words. If
    they do not fail, the library's way into torch is to blame, and they run from then on.
    """

    def __init__(
        self, graph: fx.GraphModule, steps: Steps, outputs: Outputs, lasting: Sequence[Value]
    ) -> None:
        self._graph = graph
        self._has_effect = steps.has_effect
        self._placed: Placed | None = Placed(steps, outputs, lasting)

    @property
    def program(self) -> Program | None:
        """The program, if it has not failed."""
        return None if self._placed is None else self._placed.program

    def __call__(self, *args: Any) -> Any:
        placed = self._placed
        if placed is None:
            return self._graph(*args)
        try:
            return placed(args)
        except UnsettledError:
            return self._graph(*args)
        except RuntimeError as error:
            pass_on_interruption(error)
            if self._has_effect:  # which must not happen twice
                raise
            found = self._graph(*args)
            self._placed = None
            _say_why(self._graph, error)
            return found
