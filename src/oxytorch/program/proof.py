"""Whether what several recorded runs have in common holds for all sizes.

Formulas that fit two runs need not fit a third, and code may decide by sizes. So the module's own
code runs once more, on tensors without values whose sizes are symbols: all that it asks of a size
becomes a condition. The runs so far are proven for all sizes that meet these conditions if it

- calls the same operators, with the very formulas for all numbers, shapes and strides, and
- takes the same way through the model's code as a run on real tensors, instruction by instruction:
  code that asks whether a size is an `int`, say, decides something else for a symbol.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.errors import CaptureError
from .calls import Recording, form_of, values_in
from .codes import is_models
from .in_place import without_writes
from .outputs import Output, output_tensors
from .sizes import SizedRun, Symbols, differ_in_arguments, share_externals
from .tape import READS, Recorder

_prim = torch.ops.prim


_DEEPEST_OF_LOG = 12
"""Calls of a log's handler that are followed."""
_TEXTS = [kind.__repr__.__code__ for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)]


class Way:
    """The instructions of the model's code that a run takes, in order, on this thread."""

    def __init__(self) -> None:
        self._taken: list[Any] = []
        self.shows_sizes = False  # whether it makes text of a symbol, which asks nothing of it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs in it. Raises CaptureError where a debugger does already."""
        if sys.gettrace() is not None:
            raise CaptureError("a debugger watches its code")
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def is_same(self, other: Way) -> bool:
        """Whether another run took the same way."""
        return self._taken == other._taken

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code in _TEXTS and frame.f_back is not None and is_models(frame.f_back):
            self.shows_sizes = True
        if not is_models(frame) or _is_of_log(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._taken.append(frame.f_code)
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._taken.append(frame.f_lasti)
        return self._step


def _is_of_log(frame: types.FrameType) -> bool:
    """Whether code runs to handle a line of a log, which torch writes of symbols."""
    caller = frame.f_back
    for _ in range(_DEEPEST_OF_LOG):
        if caller is None:
            break
        if caller.f_globals.get("__name__") == "logging":
            return True
        caller = caller.f_back
    return False


class _Symbolic(Recorder):  # type: ignore[no-untyped-call]
    """Notes the operator calls of a run without values.

    expected: what a run with values did; what it read there is read here.
    """

    def __init__(self, inputs: Sequence[Tensor], expected: Recording) -> None:
        super().__init__(inputs)
        self._expected = expected

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)  # torch's code is of no interest, and takes long to look at
        try:
            if func is _prim.device.default:
                return func(*args, **(kwargs or {}))
            if func in READS:
                arguments = self._arguments(func, args, kwargs or {})
                read = self._next_read(func)
                self._step(func, args, arguments, read)
                return read
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            sys.settrace(trace)

    def _next_read(self, func: Any) -> Any:
        place = len(self.steps)
        expected = self._expected.steps
        if place >= len(expected) or expected[place].operator is not func:
            raise CaptureError("its code reads other values")
        return expected[place].read

    def _literal(self, tensor: Tensor, result: Tensor) -> None:
        with _disable_current_modes():
            tensor = tensor.detach().clone()
        super()._literal(tensor, result)


def can_see_way() -> bool:
    """Whether this Python tells of every instruction (3.12 leaves some out), and no debugger
    watches this thread."""
    return sys.version_info < (3, 12) and sys.gettrace() is None


def conditions_of(
    sized: SizedRun,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Tensor],
    output: Output,
    way: Way,
) -> Symbols:
    """Symbols for the sizes of runs, which allow those that these are proven for.

    sized: the runs as one. forward: the module's own code, which `args` and `kwargs`, with the
    tensors `inputs`, gave `output`, by the way `way`, in one of them.

    Raises CaptureError with the reason where there is no proof, and what torch and the module's
    code raise of symbols.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    sizes = sized.sizes_of([*map(form_of, inputs)])
    assert sizes is not None
    symbols, own = Symbols(sizes), Way()
    mode = symbols.mode()
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        with mode:
            made = [symbols.tensor(form) for form in sized.inputs[: len(inputs)]]
        fakes = {id(tensor): fake for tensor, fake in zip(inputs, made, strict=True)}
        args, kwargs = pytree.tree_map(lambda x: fakes.get(id(x), x), (args, kwargs))
        recorder = _Symbolic(made, sized.recording)
        with mode, recorder.watching(), own.watching():
            value = forward(*args, **kwargs)
        found = recorder.recording(output_tensors(value, FakeTensor))
    if own.shows_sizes:
        raise CaptureError("its code makes text of a size")
    if not way.is_same(own):
        raise CaptureError("its code takes another way where sizes are symbols")
    if not output.is_like(value, FakeTensor):
        raise CaptureError("its output holds sizes")
    _compare(sized.recording, without_writes(found) or found, symbols)
    symbols.conditions()
    return symbols


def _compare(own: Recording, found: Recording, symbols: Symbols) -> None:
    """Raise CaptureError where a run on symbols is not what stands for all runs."""
    keys = [*own.forms]
    if len(found.steps) != len(own.steps) or [*found.forms] != keys:
        raise CaptureError("it calls other operators where sizes are symbols")
    for a, b in zip(own.steps, found.steps, strict=True):
        if not differ_in_arguments(a, b):
            raise CaptureError(f"it calls {b.operator}, not {a.operator}, where sizes are symbols")
        if not symbols.agree(a.arguments, b.arguments):
            raise CaptureError(f"an argument of {a.operator} has another formula")
    for step in own.steps:
        for key in values_in(step.results):
            if not symbols.agree(own.forms[key], found.forms[key]._replace(memory=0)):
                raise CaptureError(f"a result of {step.operator} has another formula")
    if own.outputs != found.outputs or not share_externals(own, found):
        raise CaptureError("it takes other tensors where sizes are symbols")
