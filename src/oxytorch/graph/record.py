"""The record of a real run: which functions and modules it called, on which values.

The model runs as it is, with real tensors, under modes of this thread: nothing is replaced by a
stand-in and nothing is patched for other threads. What the record cannot vouch for (a value that
was read, a write to an input, state that was kept) is noted as the reason why a call must not be
passed over.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.modes import OwnDispatchMode
from ..core.watched import PLAIN
from .code import CodeWatch, is_constant
from .state import written_to
from .steps import Held, Other, RecordedCall, RecordedStep, RecordedValue

_SHAPE_READS = frozenset(
    ["shape", "size", "dim", "ndim", "numel", "nelement", "__len__", "ndimension"]
)
KIND_READS = frozenset(
    ["dtype", "device", "is_floating_point", "is_complex", "layout", "requires_grad", "is_cuda",
     "is_sparse", "is_quantized", "is_mkldnn", "is_meta", "itemsize", "element_size", "is_leaf"]
)  # fmt: skip
"""What tells the form of a tensor, which a region is only used for."""

_STRIDE_READS = frozenset(
    ["as_strided", "as_strided_", "stride", "is_contiguous", "storage_offset", "data_ptr", "numpy",
     "untyped_storage", "storage", "tolist"]
)  # fmt: skip
_STRIDE_NAMES = frozenset(
    ["as_strided", "as_strided_", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage"]
)
"""Those of them that mean a tensor wherever code names them, also in a branch not taken."""

_PERHAPS_COPIES = frozenset(
    ["flatten", "reshape", "reshape_as", "ravel", "contiguous", "unflatten"]
)
"""What returns an alias or a copy, by the order of values in memory."""


_HOOKS = nn.Module()
"""Stands for the hooks of a module while they run: they are called, and not recorded."""


class Record(OwnDispatchMode):  # type: ignore[no-untyped-call]
    """Steps and module calls of one run; see `recording`.

    show: called before each function that the model's code calls.
    """

    def __init__(
        self,
        model: nn.Module,
        is_leaf: Callable[[nn.Module], bool],
        show: Callable[[Any, tuple[Any, ...]], None] | None = None,
    ) -> None:
        super().__init__()
        self._show = show
        self.modes: tuple[Any, ...] = ()  # under which the run began
        self.steps: list[RecordedStep] = []
        self.calls: list[RecordedCall] = []
        self.tensors: list[Tensor] = []  # by the number of their RecordedValue
        self.objects: list[Any] = []  # by the number of their Other
        self._is_leaf = is_leaf
        self._numbers: dict[int, int] = {}
        self._others: dict[int, int] = {}
        self._running: list[int] = []
        self._lists: dict[int, Any] = {}  # what lists among the arguments held, by call
        self._whole: list[nn.Module] = []  # modules being called as a whole, innermost last
        self._outer: list[Any] = []  # arguments of calls whose hooks run
        self._left: list[int] = []  # calls whose last hooks run
        self._writes: set[int] = set()
        self._held: dict[int, Held] = {}
        self._model_tensors: list[Tensor] = []  # keeps the ids valid where code replaces a buffer
        self._kept: set[int] = set()
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._held.setdefault(id(tensor), Held(module, name))
                        self._model_tensors.append(tensor)
                        self._keep(tensor)
        self._reads_strides = False
        self._perhaps_copies: set[int] = set()  # memory of which an alias might have been a copy
        kinds = {type(module) for module in model.modules()}
        own = {kind.__call__ for kind in kinds if not is_of_torch(kind.__call__)}
        codes = [getattr(call, "__code__", None) for call in own]
        self.watch = CodeWatch(
            self.refuse,
            self._reads,
            self._running_module,
            self._finds,
            self._looks_into,
            {code: self._own_call for code in codes if code is not None},
        )
        self._own_calls: list[tuple[Any, int, int]] = []
        self._last_output: Any = None  # of a module

    @property
    def reads_strides(self) -> bool:
        """Whether what the code does depends on the order of values in memory."""
        return self._reads_strides or not self.watch.attributes.isdisjoint(_STRIDE_NAMES)

    # What the code does that must not be passed over.

    def refuse(self, reason: str) -> None:
        if self._running and not self._whole and self.calls[self._running[-1]].refusal is None:
            self.calls[self._running[-1]].refusal = reason

    def _reads(self, owner: str, name: str) -> None:
        if self._running and not self._whole:
            self.calls[self._running[-1]].globals[owner, name] = None

    def _finds(self, name: str) -> None:
        if self._running and not self._whole:
            call = self.calls[self._running[-1]]
            call.methods[call.module, name] = None

    def _looks_into(self, value: Any, name: str) -> None:
        if self._running and not self._whole:
            self.calls[self._running[-1]].settings.append((value, name))

    def _running_module(self) -> nn.Module:
        return self.calls[self._running[-1]].module if self._running else nn.Module()

    def _own_call(self, frame: types.FrameType, event: str, returned: Any) -> None:
        """Refuse to go past the caller of a `__call__` that does more than call the module."""
        if self._whole or not self._running:
            return
        if event == "call":
            given = [id(leaf) for leaf in _given_to(frame)]
            self._own_calls.append((given, len(self.steps), len(self.calls)))
            return
        given, begin, number = self._own_calls.pop()
        made = self.calls[number] if number < len(self.calls) else None
        if (
            made is None
            or made.begin != begin
            or made.end != len(self.steps)
            or [id(leaf) for leaf in pytree.tree_leaves(made.given)] != given
            or returned is not self._last_output
        ):
            name = type(frame.f_locals.get(frame.f_code.co_varnames[0])).__name__
            self.refuse(f"{name} has a __call__ of its own")

    # Values.

    def _keep(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and type(tensor) in PLAIN:
            self._kept.add(_storage(tensor))

    def _new(self, tensor: Tensor) -> RecordedValue:
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)  # which keeps the id valid
        return RecordedValue(len(self.tensors) - 1)

    def named(self, nested: Any) -> Any:
        """The same structure with what stands for tensors and objects."""
        return pytree.tree_map(self._name, nested, is_leaf=_is_whole)

    def _name(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self._held:
                return self._held[id(leaf)]
            if id(leaf) in self._numbers:
                return RecordedValue(self._numbers[id(leaf)])
            self.refuse("it uses a tensor that was made elsewhere")
            return self._new(leaf)
        if is_constant(leaf) or isinstance(leaf, slice) or leaf is Ellipsis or callable(leaf):
            return leaf
        if id(leaf) not in self._others:
            self._others[id(leaf)] = len(self.objects)
            self.objects.append(leaf)
        return Other(self._others[id(leaf)])

    def given(self, nested: Any) -> Any:
        """The same structure with new values for the tensors that a call was given."""
        for leaf in pytree.tree_leaves(nested):
            if isinstance(leaf, Tensor) and id(leaf) not in self._held:
                if id(leaf) not in self._numbers:
                    self._new(leaf)
                self._keep(leaf)
        return self.named(nested)

    def _made(self, nested: Any, written: frozenset[int]) -> Any:
        def name(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return self._name(leaf)
            if id(leaf) in self._held:
                return self._held[id(leaf)]
            is_new = id(leaf) not in self._numbers
            if is_new or (leaf.layout == torch.strided and _storage(leaf) in written):
                return self._new(leaf)
            return RecordedValue(self._numbers[id(leaf)])

        return pytree.tree_map(name, nested, is_leaf=_is_whole)

    # Steps and calls.

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function and note it."""
        if not self.watch.is_looking:
            return func(*args, **kwargs)
        with self.watch.looking_away():
            if self._show is not None:
                self._show(func, args)
            return self._function(func, args, kwargs)

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._whole or not self._running:
            return func(*args, **kwargs)
        call = self.calls[self._running[-1]]
        if isinstance(func, torch.ScriptMethod):
            self.refuse("its code calls a part that is TorchScript's")
        if grad_modes() != self.modes:
            self.refuse("its code changes grad mode or autocast")
        arguments = self.named((args, kwargs))
        storages = {
            self._numbers[id(leaf)]: _storage(leaf)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
            and id(leaf) in self._numbers
            and leaf.layout == torch.strided
        }
        self._writes.clear()
        result = func(*args, **kwargs)
        writes = self._written()
        name = name_of(func)
        self._reads_strides |= name in _STRIDE_READS
        if name in _PERHAPS_COPIES:
            before = {_storage(t) for t in _strided((args, kwargs))}
            self._perhaps_copies |= before.intersection(map(_storage, _strided(result)))
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            if name in _SHAPE_READS:
                call.reads_shapes = True
            elif name in KIND_READS:
                call.reads_kinds = True
            else:
                self.refuse(f"its code calls {name}, which is no operator")
            return result
        if name in ("data", "grad", "__get__") or getattr(func, "__name__", "") == "__set__":
            self.refuse("its code sets or gets parts of tensors")
        if writes & self._kept:
            self.refuse(f"its code writes to an input or to the model's own tensors ({name})")
        if isinstance(result, (tuple, list)):
            call.reads_shapes = True  # how many there are may depend on a size
        step = RecordedStep(
            func, arguments, self._made(result, writes), self._running[-1], writes, storages
        )
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storages[self._numbers.get(id(leaf), -1)] = _storage(leaf)
        self.steps.append(step)
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a module, without hooks or as a whole."""
        if self._whole:
            self._whole.append(module)
            return
        arguments = self.named((args, kwargs)) if self._running else self.given((args, kwargs))
        self._enter(module, args, kwargs, arguments, arguments)

    def enter_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a module whose hooks run next."""
        if self._whole or self._is_leaf(module):
            self.enter(module, args, kwargs)
            return
        named = self.named((args, kwargs)) if self._running else self.given((args, kwargs))
        self._outer.append(named)
        self._begin_hooks()

    def leave_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Go on with the module's own code, with what the hooks give it."""
        if self._whole == [_HOOKS]:
            self._end_hooks()
            self._enter(module, args, kwargs, self.given((args, kwargs)), self._outer.pop())

    def _begin_hooks(self) -> None:
        self._whole.append(_HOOKS)
        self._writes.clear()

    def _end_hooks(self) -> None:
        self._whole.pop()
        if self._writes:
            self.refuse("a hook in it writes to a tensor")

    def _enter(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Any,
        outer: Any,
    ) -> None:
        parent = self._running[-1] if self._running else -1
        if parent >= 0 and grad_modes() != self.modes:
            self.refuse("its code changes grad mode or autocast")
        call = RecordedCall(module, parent, arguments, len(self.steps), outer, given=(args, kwargs))
        given = pytree.tree_leaves((args, kwargs))
        strange = [leaf for leaf in given if not (isinstance(leaf, Tensor) or is_constant(leaf))]
        if strange:
            call.refusal = f"it is given a {type(strange[0]).__name__}"
        self._lists[len(self.calls)] = inside_containers(args, kwargs)
        self.calls.append(call)
        if self._is_leaf(module):
            self._whole.append(module)
            self._writes.clear()
        else:
            self._running.append(len(self.calls) - 1)

    def enter_last_hooks(self, module: nn.Module, output: Any) -> None:
        """Note the output of a module's own code, before the hooks that follow."""
        if not self._whole:
            self._left.append(self._running[-1])
            self.leave(module, output)
            self._begin_hooks()

    def leave_last_hooks(self, module: nn.Module, output: Any) -> None:
        """Note the output that the caller gets."""
        self._last_output = output
        if self._whole == [_HOOKS]:
            self._end_hooks()
            self.calls[self._left.pop()].outer_output = self.given(output)
        else:
            self.leave(module, output)

    def leave(self, module: nn.Module, output: Any) -> None:
        self._last_output = output
        if len(self._whole) > 1:
            self._whole.pop()
            return
        if self._whole:
            self._whole.pop()
            call = self.calls[-1]
            writes = self._written()
            before = {id(t): _storage(t) for t in _strided(call.given)}
            shared = {_storage(t) for t in _strided(output) if id(t) not in before}
            self._perhaps_copies |= shared.intersection(before.values())
            if writes & self._kept:
                self.refuse("a module in it writes to an input or to the model's own tensors")
            storages = {
                self._numbers[id(leaf)]: _storage(leaf) for leaf in self._leaves(call.arguments)
            }
            made = self._made(output, writes)
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    storages[self._numbers.get(id(leaf), -1)] = _storage(leaf)
            self.steps.append(
                RecordedStep(module, call.arguments, made, call.parent, writes, storages)
            )
            call.output = call.outer_output = made
            call.end = len(self.steps)
            return
        call = self.calls[self._running[-1]]
        if inside_containers(*call.given) != self._lists[self._running[-1]]:
            self.refuse("its code writes to a list or a dictionary that it is given")
        call.output = call.outer_output = self.named(output)
        call.end = len(self.steps)
        self._running.pop()

    def _written(self) -> frozenset[int]:
        """The memory written to since it was last asked for."""
        self._reads_strides |= not self._writes.isdisjoint(self._perhaps_copies)
        return frozenset(self._writes)

    def values_of(self, named: Any) -> Any:
        """The tensors themselves in place of what stands for them."""

        def value(leaf: Any) -> Any:
            if type(leaf) is RecordedValue:
                return self.tensors[leaf.number]
            return leaf.read() if type(leaf) is Held else leaf

        return pytree.tree_map(value, named)

    def path(self, call: int) -> list[int]:
        """The calls around a step, outermost first."""
        path: list[int] = []
        while call >= 0:
            path.insert(0, call)
            call = self.calls[call].parent
        return path

    def is_step(self, call: RecordedCall) -> bool:
        """Whether a call stands in the record as a step: the module was called as a whole."""
        return self._is_leaf(call.module)

    def _leaves(self, named: Any) -> list[Tensor]:
        found = [
            self.tensors[v.number] for v in pytree.tree_leaves(named) if type(v) is RecordedValue
        ]
        return [t for t in found if t.layout == torch.strided and id(t) in self._numbers]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Random numbers fall on values in the order of memory.
        self._reads_strides |= torch.Tag.nondeterministic_seeded in func.tags
        self._writes.update(map(_storage, _strided(written_to(func, args, kwargs))))
        return func(*args, **kwargs)


def is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "torch"


def _is_whole(value: Any) -> bool:
    """Whether a value is a named tuple that checks what it is made of (PackedSequence)."""
    kind = type(value)
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return False
    named: Any = next(own for own in reversed(kind.__mro__) if "_fields" in vars(own))
    return bool(kind.__new__ is not named.__new__)


def _given_to(frame: types.FrameType) -> list[Any]:
    """The leaves of the arguments of a method's call, but for the object itself."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    places = frame.f_locals
    found = [places[name] for name in code.co_varnames[1:count]]
    for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS):
        if code.co_flags & flag:
            found.append(places[code.co_varnames[count]])
            count += 1
    return pytree.tree_leaves(found)


def inside_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What the containers among arguments hold."""
    return [[*map(id, pytree.tree_leaves(value))] for value in (*args, *kwargs.values())]


def grad_modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _strided(nested: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(nested)
    return [t for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided]


def name_of(func: Any) -> str:
    """The name of a function; of a getter, that of the attribute."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)
