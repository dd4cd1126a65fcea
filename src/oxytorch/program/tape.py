"""The record of one run of a module as a list of operator calls, from which programs are made.

It is that of calls of one form (shapes, dtypes, strides, constants): what Python computed from the
form is a constant in it. Where the module's code reads a tensor's value to decide something, the
value is noted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.interruption import pass_on_interruption
from ..core.modes import FunctionsTo, OwnDispatchMode, recording, with_normal_tensors
from ..core.watched import PLAIN
from ..graph.code import go_on_watching, stop_watching
from ..graph.errors import CaptureError
from .calls import (
    Form,
    OperatorCall,
    Recording,
    TensorRef,
    form_of,
    in_order,
    is_equal,
    is_same,
    operators,
)

_aten = torch.ops.aten
READS = (
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
)
"""Operators whose result is a Python value that code may branch on."""

_ESCAPES = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.storage_offset,
    Tensor.untyped_storage,
)
"""Methods that show a tensor's values to Python without an operator."""

_READERS = (_aten._pack_padded_sequence.default,)
"""Operators whose results depend on values in a way that no tag tells."""

_NOTED_AS = {_aten._unsafe_view.default: _aten.view.default}
"""Operators that compute the same as others, which torch calls in their place in inference mode."""
MOST_KEPT = 1 << 30
"""Bytes of results that are kept until a run is recorded again."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


_MADE_OF_DATA = frozenset(["tensor", "as_tensor", "asarray", "new_tensor", "new", "Tensor"])
_INDEXED = frozenset(["__getitem__", "__setitem__", "index_put", "index_put_", "index_fill"])
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_READ_INSIDE = frozenset(
    ["_pack_padded_sequence", "_pad_packed_sequence", "ctc_loss", "block_diag", "histogramdd",
     "__repr__", "__str__", "__format__"]
)  # fmt: skip
"""Functions that read values of their tensors without an operator that says so."""


def _refuse_escape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would show a tensor's values to Python, or to code of torch's, unseen."""
    name = getattr(func, "__name__", "")
    if func in _ESCAPES or _reads_inside(name, args, kwargs):
        raise CaptureError(f"its code calls {name}, which reads values of tensors")


def _reads_inside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "tensor_split":
        named = [value for key, value in kwargs.items() if key != "input"]
        return any(isinstance(each, Tensor) for each in (*args[1:], *named))
    if name in _READ_INSIDE:
        return not (name == "__format__" and args[0].dim() == 0)  # which reads by an operator
    if name in _MADE_OF_DATA:
        return any(map(_holds_tensor, (*args, *kwargs.values())))
    if name in _INDEXED:
        return any(map(_is_list_with_tensor, args))
    # Of a packed sequence: its second argument tells the lengths.
    return name in _RECURRENT and len(args) > 3 and isinstance(args[3], (list, tuple))


def _holds_tensor(value: Any) -> bool:
    """Whether a list or tuple holds a tensor, however deep."""
    leaves = pytree.tree_leaves(value) if isinstance(value, (list, tuple)) else ()
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def _is_list_with_tensor(value: Any) -> bool:
    """Whether a list, or one in a tuple, holds a tensor."""
    if isinstance(value, tuple):
        return any(map(_is_list_with_tensor, value))
    return isinstance(value, list) and _holds_tensor(value)


class Recorder(OwnDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operator calls of what runs under it.

    goes_on: whether what cannot be noted runs all the same; `refusal` says then what it was.
    before: a recording of the same run, whose results stand for what is computed again. They do up
    to the first operator that is another one, or has other arguments.
    """

    def __init__(
        self, inputs: Iterable[Tensor], goes_on: bool = False, before: Recording | None = None
    ) -> None:
        super().__init__()
        self.refusal: CaptureError | None = None
        self._goes_on = goes_on
        self.steps: list[OperatorCall] = []
        self.externals: list[Tensor] = []
        self.forms: dict[TensorRef, Form] = {}
        self.literals: set[int] = set()  # externals made of Python values, which make no identity
        self._values: dict[int, TensorRef] = {}
        self._alive: list[Tensor] = []  # keeps every id above valid
        self._protected: set[int] = set()
        self._results = 0
        self._before = None if before is None or not before.made else before
        self._lends = False  # whether results stand for some
        for number, tensor in enumerate(inputs):
            self._name(tensor, TensorRef("input", number))
            self._protect(tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs in it, where values of tensors may not be shown unseen.

        torch's layers that compute several operators in one (TransformerEncoder, among others) do
        not under a function mode: `looking_on` sees those.
        """
        with self.looking_on(), FunctionsTo(self._function):
            yield

    @contextmanager
    def looking_on(self) -> Iterator[None]:
        """Note the operators of what runs in it, which takes the ways that it takes otherwise."""
        with recording(), self:
            yield

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._try(_refuse_escape, func, args, kwargs)
        return func(*args, **kwargs)

    def _try(self, note: Callable[..., Any], *given: Any) -> Any:
        """Note something, unless something else was refused before; None if it is refused."""
        if self.refusal is not None:
            return None
        watch = stop_watching()  # whoever looks at the code that runs is to see the module's alone
        try:
            return note(*given)
        except CaptureError as error:
            refusal = CaptureError(f"{error}{_place()}")
            if not self._goes_on:
                raise refusal from None
        except Exception as error:  # of tensors of other kinds, whose sizes cannot be asked
            pass_on_interruption(error)
            if not self._goes_on:
                raise
            first = str(error).partition("\n")[0]
            refusal = CaptureError(f"it cannot be recorded, {type(error).__name__}: {first}")
        finally:
            go_on_watching(watch)
        self.refusal = refusal
        return None

    def value(self, tensor: Tensor) -> TensorRef:
        """The value that stands for a tensor; one not seen before comes from outside."""
        found = self._values.get(id(tensor))
        if found is None:
            if type(tensor) not in PLAIN:
                raise CaptureError(f"an operator takes a {type(tensor).__name__}")
            found = TensorRef("external", len(self.externals))
            self.externals.append(tensor)
            self._name(tensor, found)
            self._protect(tensor)
        return found

    def recording(self, tensors: Iterable[Tensor], output: Any = None) -> Recording:
        """What was noted. tensors: those of the output, in order. Raises CaptureError."""
        found = [*tensors]
        outputs = [self.value(tensor) for tensor in found]
        parts = self.steps, self.externals, outputs, found, output, self.forms
        return Recording(*parts, self.literals)

    def made(self) -> dict[TensorRef, Tensor]:
        """The tensors of the results, if they are few enough to keep and nothing writes to them."""
        of = {id(tensor): tensor for tensor in self._alive}
        made = {v: of[key] for key, v in self._values.items() if v.kind == "result"}
        with torch._C.DisableTorchFunction():  # whoever watches would take it for the model's code
            storages = [tensor.untyped_storage() for tensor in made.values()]
        memories = {storage._cdata: storage.nbytes() for storage in storages}
        is_kept = sum(memories.values()) <= MOST_KEPT
        is_kept &= not any(step.operator._schema.is_mutable for step in self.steps)
        return made if is_kept else {}

    def _name(self, tensor: Tensor, value: TensorRef) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def _protect(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            self._protected.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.allclose.default:
            with self:  # which notes the value that is read as any other
                return bool(_aten.isclose.default(*args, **kwargs).all().item())
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # in this mode torch does not take operators apart before they come here
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func is _aten.detach_.default:  # of `torch.tensor` in this mode; it writes no values
            self._try(self._arguments, func, args, kwargs)  # but may not detach what others have
            return self._call(func, args, kwargs)
        arguments = self._try(self._arguments, func, args, kwargs)
        lends = self._lends or self._before is not None
        known = self._try(self._known, func, arguments) if lends else None
        result = self._call(func, args, kwargs) if known is None else known[0]
        self._try(self._step, func, args, arguments, result)
        return result

    def _form(self, tensor: Tensor) -> Form:
        return form_of(tensor)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for the arguments of a call, in order."""
        if not isinstance(func, torch._ops.OpOverload):
            raise CaptureError(f"{func} is no single operator")
        if func in _READERS:
            raise CaptureError(f"{func} reads values of its tensors")
        if torch.Tag.dynamic_output_shape in func.tags and not _by_places(func, args):
            raise CaptureError(f"the size of {func}'s result depends on values")
        if torch.Tag.data_dependent_output in func.tags and func not in READS:
            raise CaptureError(f"{func}'s result depends on values")
        if func is _aten.lift_fresh.default:
            return ()
        given = in_order(func, args, kwargs)
        found = tuple(self._replaced(value) for value in given)
        for argument, value in zip(func._schema.arguments, given, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._refuse_write(func, value)
        return found

    def _known(self, func: Any, arguments: Any) -> tuple[Any] | None:
        """What this call made in the recording before, in other tensors over its memory."""
        if self._lends and func._schema.is_mutable:  # it might write to what others took
            raise CaptureError("two runs on one input differ")
        before = self._before
        if before is None or func in READS or func is _aten.lift_fresh.default:
            return None
        place = len(self.steps)
        step = before.steps[place] if place < len(before.steps) else None
        is_same = step is not None and step.operator is _NOTED_AS.get(func, func)
        if step is None or not is_same or not _are_alike(step.arguments, arguments):
            self._before = None  # from here on values of one number are not the same
            return None
        self._lends = True
        made = tuple(_again(each, before.made) for each in step.results)
        return made if len(func._schema.returns) == 1 else (made,)

    def _step(self, func: Any, args: tuple[Any, ...], arguments: Any, result: Any) -> None:
        """Note a call and its result."""
        if func is _aten.lift_fresh.default:
            self._literal(args[0], result)
        elif func in READS:
            self.steps.append(OperatorCall(func, arguments, (), result))
        else:
            results = result if len(func._schema.returns) != 1 else (result,)
            made = tuple(self._result(func, each) for each in results or ())
            self.steps.append(OperatorCall(_NOTED_AS.get(func, func), arguments, made))

    def _literal(self, tensor: Tensor, result: Tensor) -> None:
        """Note a tensor that is made of Python values, as a copy of a constant."""
        value = TensorRef("external", len(self.externals))
        self.externals.append(_copy(tensor))
        self.literals.add(value.number)
        self.steps.append(
            OperatorCall(
                _aten.clone.default, (value, None), (self._result(_aten.clone.default, result),)
            )
        )

    def _replaced(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.value(argument)
        if isinstance(argument, (list, tuple)):
            return tuple(self._replaced(item) for item in argument)
        if isinstance(argument, torch.ScriptObject):
            raise CaptureError("an operator takes an object of TorchScript's")
        return argument

    def _result(self, func: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            value = TensorRef("result", self._results)
            self._results += 1
            if result.layout != torch.strided:
                raise CaptureError(f"{func} returns a {result.layout} tensor")
            self.forms[value] = self._form(result)
            self._name(result, value)
            return value
        if isinstance(result, (list, tuple)):
            return [self._result(func, item) for item in result]
        if result is not None:
            raise CaptureError(
                f"{func} returns a {type(result).__name__}, which depends on values of its tensors"
            )
        return None

    def _refuse_write(self, func: Any, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            if tensor.untyped_storage()._cdata in self._protected:
                raise CaptureError(f"{func} writes to an input or to the model's own tensors")


@with_normal_tensors
def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@functools.lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    """Whether an operator is one that torch takes apart, for inference too."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE))


def _again(made: Any, known: Mapping[TensorRef, Tensor]) -> Any:
    """Results, as other tensors over their memory."""
    if isinstance(made, list):
        return [_again(each, known) for each in made]
    return None if made is None else known[made].detach()


def _are_alike(first: Any, second: Any) -> bool:
    """Whether arguments are equal and of the same types: 1 and True are not, for an operator."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_are_alike, first, second))
    return is_equal(first, second)


def _by_places(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator takes values at given places, whose number it knows from a shape."""
    if func is not _aten.index.Tensor:
        return False
    return not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def is_random(func: Any, arguments: Sequence[Any]) -> bool:
    """Whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = {a.name: value for a, value in zip(func._schema.arguments, arguments, strict=True)}
    is_training = all(named.get(name) is not False for name in ("train", "training"))
    return named.get("dropout_p") != 0.0 and is_training


def recorded_again(
    first: Recording,
    run: Callable[[], tuple[Any, Iterable[Tensor]]],
    inputs: list[Tensor],
    was_watched: bool = False,
) -> tuple[Recording, bool]:
    """Record `run` once more, of which `first` is a recording already.

    run: returns the module's output and the tensors in it.
    inputs: the tensors of the call.
    was_watched: whether the first run was watched; else it was looked on. The other one is now.
        Where torch took another way in it, a third one is watched.

    Returns a recording, and whether torch takes the same way in runs that are looked on. Raises
    CaptureError, also where the runs differ: the module keeps a state of its own.
    """
    second = _recorded(run, inputs, looks_on=was_watched, before=first)
    first.made = {}
    is_plain = operators(first) == operators(second)
    if not is_plain:
        third = _recorded(run, inputs)
        is_plain = was_watched and operators(second) == operators(third)
        first, second = second if is_plain or not was_watched else first, third
    same = len(first.externals) == len(second.externals) and all(
        a is b or (number in second.literals and is_same(a, b))
        for number, (a, b) in enumerate(zip(first.externals, second.externals, strict=True))
    )
    if not same or not _take_the_same(first, second) or first.outputs != second.outputs:
        raise CaptureError("two runs on one input differ")
    return second, is_plain


def _take_the_same(first: Recording, second: Recording) -> bool:
    """Whether two runs call the same operators, with arguments of the same types and values."""
    return len(first.steps) == len(second.steps) and all(
        (a.operator, a.results) == (b.operator, b.results)
        and _are_alike(a.arguments, b.arguments)
        and is_equal(a.read, b.read)
        for a, b in zip(first.steps, second.steps, strict=True)
    )


def _recorded(
    run: Callable[[], tuple[Any, Iterable[Tensor]]],
    inputs: list[Tensor],
    looks_on: bool = False,
    before: Recording | None = None,
) -> Recording:
    recorder = Recorder(inputs, before=before)
    with recorder.looking_on() if looks_on else recorder.watching():
        output, found = run()
    return recorder.recording(found, output)


def recorded_once(
    run: Callable[[], Any],
    tensors_of: Callable[[Any], Iterable[Tensor]],
    inputs: list[Tensor],
    *,
    looks_on: bool = False,
    keeps: bool = False,
) -> tuple[Any, Recording | CaptureError]:
    """Run `run` once, to its end, and record it.

    looks_on: whether it runs as it does otherwise (see `Recorder.looking_on`).
    keeps: whether its results are kept for `recorded_again`, which need not compute them again.

    Returns the module's output, and the recording of what `tensors_of` finds in it, or why there is
    none: only errors of the module's own code are raised.
    """
    recorder = Recorder(inputs, goes_on=True)
    with recorder.looking_on() if looks_on else recorder.watching():
        output = run()
    if recorder.refusal is not None:
        return output, recorder.refusal
    if any(is_random(step.operator, step.arguments) for step in recorder.steps):
        return output, CaptureError("its code draws random numbers")
    try:
        found = recorder.recording(tensors_of(output), output)
        found.made = recorder.made() if keeps else {}
        return output, found
    except CaptureError as error:
        return output, error
    except RecursionError:
        return output, CaptureError("its output holds itself")
    except RuntimeError as error:  # of tensors of other kinds, whose sizes cannot be asked
        first = str(error).partition("\n")[0]
        return output, CaptureError(f"its output cannot be recorded: {first}")


def _place() -> str:
    """The line of the module's code, outside of torch, that is recorded now; "" if there is none.

    Where only torch's own layers run there is none.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in (_recorded.__code__, recorded_once.__code__):
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")):
            return f", at {os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_LIBRARIES = tuple(os.path.dirname(path) for path in (torch.__file__, os.path.dirname(__file__)))
"""The folders of torch and of this package."""
