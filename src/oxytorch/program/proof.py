"""Whether what several recorded runs have in common holds for all sizes.

Formulas that fit two runs need not fit a third, and code may decide by sizes. So the module's own
code runs once more, on tensors without values whose sizes are symbols: all that it asks of a size
becomes a condition. The runs so far are proven for all sizes that meet these conditions if it

- calls the same operators, with formulas for all numbers, shapes and strides that give those of
  the runs, and
- takes the same way through the model's code as a run on real tensors, instruction by instruction:
  code that asks whether a size is an `int`, say, decides something else for a symbol.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..core.tensor_forms import is_dense
from ..graph.errors import CaptureError
from ..ops.windows import positions
from .calls import Form, Recording, form_of, values_in
from .in_place import without_writes
from .inputs import ModuleCall
from .outputs import OutputStructure, output_tensors
from .passes.convolution_times import LAST
from .plan import hint
from .sizes import SizedRun, differ_in_arguments, share_externals
from .symbols import Symbols
from .tape import READS, Recorder
from .way import Way, new_way

_aten, _prim = torch.ops.aten, torch.ops.prim
_BY_IMAGES = {_aten.convolution.default, _aten.constant_pad_nd.default}
"""Operators that compute each image of a batch by itself, of any size."""
_NORMS = {
    _aten._native_batch_norm_legit_no_training.default: slice(0),
    _aten.native_batch_norm.default: slice(5, 6),
}
"""Batch normalizations, with the place of the argument that says whether they are trained."""
_CPU = torch.device("cpu")


class _Symbolic(Recorder):  # type: ignore[no-untyped-call]
    """Notes the operator calls of a run without values.

    Its tensors are plain ones, as those of a run with values are: code that asks for the class of a
    tensor, as for torch's `FakeTensor`, is told the same. They have sizes, which may be symbols,
    and no memory. Behind each of them stands one of torch's fake tensors, of which the operators
    compute the forms.

    made: the fake tensors of the inputs; fakes: their mode.
    expected: what a run with values did; what it read there is read here.
    way: that of the run.
    """

    def __init__(self, made: Sequence[Tensor], fakes: Any, expected: Recording, way: Way) -> None:
        self._fakes, self._expected, self._way = fakes, expected, way
        self._behind: dict[int, Tensor] = {}  # by the tensors that the code sees
        self._seen_of: dict[int, Tensor] = {}  # and the way back
        self.inputs = [self._seen(fake) for fake in made]
        super().__init__(self.inputs)

    def _seen(self, fake: Any) -> Tensor:
        """The tensor that the code sees of a fake one."""
        seen = self._seen_of.get(id(fake))
        if seen is None:
            if fake.is_conj() or fake.is_neg():
                raise CaptureError("it makes tensors that are conjugated when they are read")
            plain = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
            seen = Tensor._make_subclass(Tensor, plain, False, dispatch_device=True)
            self._seen_of[id(fake)], self._behind[id(seen)] = seen, fake
        return seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self._way.paused():
            if func is _prim.device.default:
                return _CPU
            if func in READS:
                arguments = self._arguments(func, args, kwargs or {})
                read = self._next_read(func)
                self._step(func, args, arguments, read)
                return read
            if _is_whole(func, args) and not self._takes_all():
                return self._all_of(args[0], types)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the forms of what an operator gives."""
        if torch.Tag.inplace_view in func.tags:
            raise CaptureError(f"{func} changes the shape of a tensor in place")
        args, kwargs = pytree.tree_map(lambda x: self._behind.get(id(x), x), (args, kwargs))
        with self._fakes:
            known = _form_of_images if func in _BY_IMAGES else _form_of_elements
            found = known(func, args) if not kwargs else None
            if found is None:
                found = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._seen, found)

    def _form(self, tensor: Tensor) -> Form:
        return form_of(self._behind[id(tensor)])

    def _all_of(self, tensor: Tensor, types: Any) -> Any:
        """What torch makes of a slice that takes all, where sizes are numbers: an alias, or nothing
        at all."""
        if self._next_operator() is _aten.alias.default:
            return super().__torch_dispatch__(_aten.alias.default, types, (tensor,))
        value = self.value(tensor)
        same: Tensor = self._call(_aten.alias.default, (tensor,), {})
        self._name(same, value)
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


def _form_of_elements(func: Any, args: tuple[Any, ...]) -> Any:
    """The results of an operator that computes each element by itself, or normalizes by known
    statistics: they lie as what it takes does. None of others.

    Torch's own functions for symbols take a tenth of a second for each of these.
    """
    tensors = [each for each in args if isinstance(each, Tensor)]
    is_norm = func in _NORMS and not any(args[_NORMS[func]])
    if not tensors or not (is_norm or torch.Tag.pointwise in func.tags) or func._schema.is_mutable:
        return None
    x, *others = tensors[:1] if is_norm else tensors
    symbols = [n for n in x.shape if isinstance(n, torch.SymInt)]
    shape, stride = (tuple(map(hint, each)) for each in (x.shape, x.stride()))
    one = torch.empty_strided(shape, stride, dtype=x.dtype, device="cpu")
    if not symbols or 0 in shape or not is_dense(one) or any(_form(y) != _form(x) for y in others):
        return None
    if not all(n > 1 for n in symbols):
        return None
    own = {id(y): one for y in (x, *others)}
    found = func(*(own.get(id(each), each) for each in args))
    results = found if isinstance(found, tuple) else (found,)
    if results[0].shape != one.shape or results[0].stride() != one.stride():
        return None
    first = torch.empty_strided(x.shape, x.stride(), dtype=results[0].dtype, device="cpu")
    return (first, *results[1:]) if isinstance(found, tuple) else first


def _form(x: Tensor) -> Any:
    """Sizes, strides and dtype of a tensor, to be compared with those of another one."""
    return [[_word(n) for n in each] for each in (x.shape, x.stride())], x.dtype


def _word(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _form_of_images(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The result of a convolution or of padding of which the sizes of images, or their number, are
    symbols; None of others.

    Torch asks for these sizes to choose among its kernels, which give all sizes the same order in
    memory, or makes them those of this run: what it asks would become a condition.
    """
    x, *rest = args
    sizes = [n for each in rest if isinstance(each, Tensor) for n in each.shape]
    is_pad = func is _aten.constant_pad_nd.default
    numbers = [] if is_pad else pytree.tree_leaves(rest)
    if any(isinstance(n, torch.SymInt) for n in (*numbers, *sizes)):
        return None
    if not all(n > 0 for n in x.shape) or not (is_pad or type(x.shape[1]) is int):
        return None
    shape, stride = (tuple(map(hint, each)) for each in (x.shape, x.stride()))
    one = torch.empty_strided(shape, stride, dtype=x.dtype, device="cpu")
    found: Tensor = func(one, *(rest if not is_pad else ([*map(hint, rest[0])], *rest[1:])))
    of_all = _padded(x.shape, rest[0]) if is_pad else _convolved(x.shape, found.shape[1], *rest)
    if (*map(hint, of_all),) != found.shape or not all(n > _least(n) for n in of_all):
        return None
    if not any(isinstance(n, torch.SymInt) for n in of_all[1:]):
        return torch.empty_strided(of_all, found.stride(), dtype=found.dtype, device="cpu")
    for order in (torch.contiguous_format, *({LAST[x.dim()]} if x.dim() in LAST else ())):
        if found.is_contiguous(memory_format=order):
            return torch.empty(of_all, dtype=found.dtype, device="cpu", memory_format=order)
    return None


def _least(size: Any) -> int:
    """What a size has to be above: 1 if it may be any, since of one that is 1 orders look alike."""
    return 1 if isinstance(size, torch.SymInt) else 0


def _padded(shape: Sequence[Any], pads: Sequence[int]) -> tuple[Any, ...]:
    """The sizes of a tensor with elements added before and after each of the last dimensions."""
    more = [a + b for a, b in zip(pads[::2], pads[1::2], strict=True)][::-1]
    more = [0] * (len(shape) - len(more)) + more
    return tuple(n + each for n, each in zip(shape, more, strict=True))


def _convolved(shape: Sequence[Any], channels: int, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The sizes of what a convolution gives, which has so many channels."""
    kernel, dims = weight.shape[2:], len(shape) - 2
    _, *lists, is_transposed, more, _ = rest
    stride, padding, dilation = (each if len(each) == dims else [*each] * dims for each in lists)
    if not is_transposed:
        pads = [size for size in padding for _ in range(2)]
        return shape[0], channels, *positions(shape, kernel, stride, pads, dilation)
    parts = zip(shape[2:], kernel, stride, padding, dilation, more, strict=True)
    return (
        shape[0],
        channels,
        *((n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, d, m in parts),
    )


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
    call: ModuleCall,
    output: OutputStructure,
    way: Way,
) -> tuple[Symbols, SizedRun]:
    """Symbols for the sizes of runs, which allow those that these are proven for, and the runs with
    the formulas that a run on symbols computes: what fits some runs may be others.

    sized: the runs as one.
    forward: the module's own code, which gave `output` for `call`, by the way `way`, in one of
        them.

    Raises CaptureError with the reason where there is no proof, and what torch and the module's
    code raise of symbols.
    """
    inputs = call.tensors
    sizes = sized.sizes_of([*map(form_of, inputs)])
    assert sizes is not None
    symbols, own = Symbols(sizes), new_way()
    mode = symbols.mode()
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        with mode:
            made = [symbols.tensor(form) for form in sized.inputs[: len(inputs)]]
        recorder = _Symbolic(made, mode, sized.recording, own)
        seen = {id(given): plain for given, plain in zip(inputs, recorder.inputs, strict=True)}
        args, kwargs = pytree.tree_map(lambda x: seen.get(id(x), x), (call.args, call.kwargs))
        with recorder.watching(), own.watching(), _without_lines_of_failures():
            value = forward(*args, **kwargs)
        found = recorder.recording(output_tensors(value))
    if own.unseen:
        raise CaptureError(own.unseen)
    if own.shows_sizes:
        raise CaptureError("its code makes text of a size")
    if symbols.has_number():
        raise CaptureError("its code takes a size as a plain number, as `int(size)` does")
    if not way.is_same(own):
        raise CaptureError(
            f"its code takes another way where sizes are symbols, behind {way.parts(own)}"
        )
    if not output.is_like(value):
        raise CaptureError("its output holds sizes")
    recording = _settled(sized.recording, without_writes(found) or found, symbols)
    symbols.conditions()
    return symbols, sized if recording is None else sized.corrected(recording)


def _settled(own: Recording, found: Recording, symbols: Symbols) -> Recording | None:
    """What stands for all runs, by the formulas of a run on symbols; None where they are the same.
    Raises CaptureError where that is another run."""
    keys = [*own.forms]
    if len(found.steps) != len(own.steps) or [*found.forms] != keys:
        raise CaptureError("it calls other operators where sizes are symbols")
    steps, forms = [], {**own.forms}
    taken = {value for step in own.steps for value in values_in(step.arguments)}
    taken.update(own.outputs)
    for a, b in zip(own.steps, found.steps, strict=True):
        if not differ_in_arguments(a, b):
            raise CaptureError(f"it calls {b.operator}, not {a.operator}, where sizes are symbols")
        try:
            steps.append(replace(a, arguments=symbols.settled(a.arguments, b.arguments)))
        except CaptureError as error:
            raise CaptureError(f"an argument of {a.operator} has {error}") from None
        for key in values_in(a.results):
            if key not in taken:
                continue  # torch's fake tensors have another dtype for means that norms return
            one, other = own.forms[key], found.forms[key]._replace(memory=0)
            if key not in own.outputs:
                other = _with_needless_strides(other, one)
            try:
                forms[key] = symbols.settled(one, other)
            except CaptureError as error:
                raise CaptureError(f"a result of {a.operator} has {error}") from None
    if own.outputs != found.outputs or not share_externals(own, found):
        raise CaptureError("it takes other tensors where sizes are symbols")
    is_same = all(a.arguments is b.arguments for a, b in zip(own.steps, steps, strict=True))
    if is_same and forms == own.forms:
        return None
    return replace(own, steps=steps, forms=forms)


def _with_needless_strides(form: Form, own: Form) -> Form:
    """A form with the strides of another one for dimensions of one element: these say nothing of
    where elements lie, and torch gives them others where sizes are symbols."""
    if len(form.shape) != len(own.shape):
        return form
    pairs = zip(form.shape, form.stride, own.stride, strict=True)
    return form._replace(stride=tuple(b if _is_one(size) else a for size, a, b in pairs))


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1
