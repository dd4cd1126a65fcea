"""Whether what several recorded runs have in common holds for all sizes.

Formulas that fit two runs need not fit a third, and code may decide by sizes. So the module's own
code runs once more, on tensors without values whose sizes are symbols: all that it asks of a size
becomes a condition. The runs so far are proven for all sizes that meet these conditions if it

- calls the same operators, with the very formulas for all numbers, shapes and strides, and
- takes the same way through the model's code as a run on real tensors, instruction by instruction:
  code that asks whether a size is an `int`, say, decides something else for a symbol.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.errors import CaptureError
from .calls import Recording, form_of, values_in
from .in_place import without_writes
from .outputs import Output, output_tensors
from .sizes import SizedRun, Symbols, differ_in_arguments, share_externals
from .tape import READS, Recorder
from .way import Way, new_way

_aten, _prim = torch.ops.aten, torch.ops.prim


class _Symbolic(Recorder):  # type: ignore[no-untyped-call]
    """Notes the operator calls of a run without values.

    expected: what a run with values did; what it read there is read here. way: that of the run.
    """

    def __init__(self, inputs: Sequence[Tensor], expected: Recording, way: Way) -> None:
        super().__init__(inputs)
        self._expected, self._way = expected, way

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self._way.paused():
            if func is _prim.device.default:
                return func(*args, **(kwargs or {}))
            if func in READS:
                arguments = self._arguments(func, args, kwargs or {})
                read = self._next_read(func)
                self._step(func, args, arguments, read)
                return read
            if _is_whole(func, args) and not self._takes_all():
                return self._all_of(args[0], types)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _all_of(self, tensor: Tensor, types: Any) -> Any:
        """What torch makes of a slice that takes all, where sizes are numbers: an alias, or nothing
        at all."""
        if self._next_operator() is _aten.alias.default:
            return super().__torch_dispatch__(_aten.alias.default, types, (tensor,))
        same = tensor.detach()
        self._name(same, self.value(tensor))
        return same

    def _next_read(self, func: Any) -> Any:
        if self._next_operator() is not func:
            raise CaptureError("its code reads other values")
        return self._expected.steps[len(self.steps)].read

    def _takes_all(self) -> bool:
        """Whether the step to which this run has come is such a slice in the other one, too."""
        place, steps = len(self.steps), self._expected.steps
        return place < len(steps) and _is_whole(steps[place].operator, steps[place].arguments)

    def _next_operator(self) -> Any:
        """That of the step to which this run has come, in the other one."""
        place, steps = len(self.steps), self._expected.steps
        return steps[place].operator if place < len(steps) else None

    def _literal(self, tensor: Tensor, result: Tensor) -> None:
        with _disable_current_modes():
            tensor = tensor.detach().clone()
        super()._literal(tensor, result)


def _is_whole(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call takes all of a tensor, whatever its size, as `x[:, 0]` does first."""
    if func is not _aten.slice.Tensor or len(args) < 4:
        return False
    (start, end), step = args[2:4], args[4] if len(args) > 4 else 1
    return all(type(each) is int for each in (start, end, step)) and (start, end, step) == (
        0,
        sys.maxsize,
        1,
    )


_FAILURES = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch writes, at level ERROR, that an operator has raised one for symbols. Then there is no
proof, which is no error."""


@contextmanager
def _without_lines_of_failures() -> Iterator[None]:
    """Have torch write no such line of what this thread runs. What is logged elsewhere, and by
    others meanwhile, is logged as it is."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        is_failure = record.levelno == logging.ERROR and record.exc_info is not None
        return not is_failure or threading.get_ident() != thread

    _FAILURES.addFilter(is_of_others)
    try:
        yield
    finally:
        _FAILURES.removeFilter(is_of_others)


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
    symbols, own = Symbols(sizes), new_way()
    mode = symbols.mode()
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        with mode:
            made = [symbols.tensor(form) for form in sized.inputs[: len(inputs)]]
        fakes = {id(tensor): fake for tensor, fake in zip(inputs, made, strict=True)}
        args, kwargs = pytree.tree_map(lambda x: fakes.get(id(x), x), (args, kwargs))
        recorder = _Symbolic(made, sized.recording, own)
        with mode, recorder.watching(), own.watching(), _without_lines_of_failures():
            value = forward(*args, **kwargs)
        found = recorder.recording(output_tensors(value, FakeTensor))
    if own.unseen:
        raise CaptureError(own.unseen)
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
