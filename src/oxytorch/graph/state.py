"""What a run of a model may change, and how it is put back.

Python state (attributes, containers, random number generators) is noted before a run. Tensors are
not copied beforehand, since weights are large: a first run under `State.watching` keeps the values
of those that it writes to, just before it does.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.modes import FunctionsTo, OwnDispatchMode
from ..core.operators import uses_of
from ..core.packed import PackedTensor
from ..core.watched import PLAIN

Path = tuple[Any, ...]
"""Where a tensor is held: attributes, keys and places, from a root on."""

_PLAIN = (*PLAIN, nn.Buffer)
_CONSTANT = frozenset(
    [type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size,
     torch.layout, torch.memory_format, range, slice]
)  # fmt: skip
_SHOWN = frozenset(
    ["numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_data_of"]
)
"""What hands out the memory of a tensor, to which may then be written unseen."""
_STATISTICS = ("running_mean", "running_var")
"""Arguments that torch's operators write to without saying so, in training."""
_TRAINING = ("training", "train", "use_input_stats")


class State:
    """The state of models and of what they are called with, as it is now.

    roots: models, and the arguments of a call.
    written: paths of tensors whose values are kept from the start, since a run is known to write to
        them; None keeps those of all but parameters.

    Seen are attributes of modules and of other objects, and the containers in them, however deep;
    not what lies in objects of Python's standard library (files, locks, iterators), in closures and
    in global variables.
    """

    def __init__(self, roots: Iterable[Any], written: Iterable[Path] | None = ()) -> None:
        self.written: set[Path] = set()
        self._tensors: dict[Path, list[tuple[Tensor, Any]]] = {}
        self._paths: dict[int, set[Path]] = {}  # by memory
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        for root in roots:
            waiting: list[tuple[Path, Any]] = [((), root)]
            while waiting:
                waiting += reversed([*self._note(*waiting.pop())])
        self._random = random_states()
        for path in [*self._tensors] if written is None else written:
            for tensor, _ in self._tensors.get(path, ()):
                if written is not None or not isinstance(tensor, nn.Parameter):
                    self.keep(tensor)

    def _note(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        """Note a value and yield what it holds."""
        kind = type(value)
        if kind in _CONSTANT or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # which keeps the id valid
        if isinstance(value, Tensor):
            alias = value.data if _is_plain(value) else None
            self._tensors.setdefault(path, []).append((value, alias))
            self._paths.setdefault(_memory(value), set()).add(path)
            return
        if isinstance(value, torch.jit.ScriptModule):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield (*path, name), tensor
            return
        held = self._contents(value)
        if held is not None:
            for number, (key, item) in enumerate(held):
                yield (*path, key if type(key) in (str, int) else number), item
            return
        if _is_opaque(value):
            self._generator(value)
            return
        if isinstance(value, nn.RNNBase):
            # It refers weakly to weights, which could not be swapped if these references were kept.
            self._seen[id(value._flat_weight_refs)] = value._flat_weight_refs
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield path, own
        yield from self._slots(path, value)

    def _contents(self, value: Any) -> Iterable[tuple[Any, Any]] | None:
        """What a container holds, which is noted; None for what is none."""
        if isinstance(value, dict):
            items = [*dict.items(value)]
            self._undo.append(lambda: _restore_dict(value, items))
            return items
        if isinstance(value, tuple):
            return enumerate(value)
        if not isinstance(value, (list, deque, set, bytearray)):
            return None
        before = [*value]
        self._undo.append(lambda: _restore_items(value, before))
        return () if isinstance(value, bytearray) else enumerate(before)

    def _slots(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name in ("__dict__", "__weakref__") or not hasattr(value, name):
                    continue
                item = getattr(value, name)
                self._undo.append(partial(_restore_slot, value, name, item))
                yield (*path, name), item

    def _generator(self, value: Any) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(partial(value.set_state, state))
        elif isinstance(value, random.Random):
            drawn = value.getstate()
            self._undo.append(lambda: value.setstate(drawn))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            numbers = bits.state
            self._undo.append(lambda: setattr(bits, "state", numbers))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            words = value.get_state()
            self._undo.append(lambda: value.set_state(words))
        elif numpy is not None and type(value) is numpy.ndarray and value.flags.writeable:
            numbers = value.copy()
            self._undo.append(lambda: numpy.copyto(value, numbers))

    def held(self) -> set[int]:
        """The identities of the tensors that runs are known to write to."""
        return {id(t) for path in self.written for t, _ in self._tensors[path]}

    def keep(self, tensor: Tensor) -> None:
        """Keep the values of a tensor that is about to be written to, if it is of this state."""
        memory = _memory(tensor)
        if memory not in self._paths:
            return
        self.written |= self._paths[memory]
        if memory not in self._kept:
            with torch.inference_mode(False), torch.no_grad():
                raw = _raw(tensor)
                source = tensor.detach() if raw is None else raw
                self._kept[memory] = source, source.clone(), _version(source)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While a run of this thread is to have what it writes to kept."""

        def function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.show(func, args)
            return func(*args, **kwargs)

        with FunctionsTo(function), self.writing():
            yield

    def writing(self) -> AbstractContextManager[Any]:
        """The same where somebody else calls `show` before each function."""
        return _Writes(self)

    def show(self, func: Any, args: tuple[Any, ...]) -> None:
        """Keep a tensor before a function shows its memory to somebody."""
        if getattr(func, "__name__", "") in _SHOWN and args and isinstance(args[0], Tensor):
            self.keep(args[0])

    def restore(self) -> None:
        """Put back what was changed since."""
        for undo in reversed(self._undo):
            undo()
        changed: set[Path] = set()
        with torch.no_grad():
            for memory, (source, values, version) in self._kept.items():
                if _differs(source, values, version):
                    with torch.inference_mode(source.is_inference()):
                        source.copy_(values)
                    changed |= self._paths[memory]
        for path, found in self._tensors.items():
            for tensor, alias in found:
                if alias is not None and not _is_over(tensor, alias):
                    tensor.data = alias
                if path in changed and not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        _restore_random(self._random)


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Put back what the code of small modules changes in them; their tensors are copied."""
    state = State(modules, None)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def random_unmoved() -> Iterator[None]:
    """Put the global random number generators back to where they are now."""
    before = random_states()
    try:
        yield
    finally:
        _restore_random(before)


def _differs(source: Tensor, values: Tensor, version: int) -> bool:
    if _is_plain(source) or isinstance(source, PackedTensor):
        return not torch.equal(source, values)
    return source.is_inference() or source._version != version


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is over memory of one order, which torch shows."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        return False
    return not tensor.is_nested and not tensor.is_quantized


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's memory, or of the tensor where it has none of its own."""
    if not _is_plain(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _raw(tensor: Tensor) -> Tensor | None:
    """All memory that a tensor is over, as bytes; None where it has none of its own."""
    if not _is_plain(tensor):
        return None
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage())


def _is_over(tensor: Tensor, alias: Tensor) -> bool:
    """Whether a tensor still is what it was: the same memory, shape and dtype."""
    return (
        _is_plain(tensor)
        and tensor.dtype == alias.dtype
        and _memory(tensor) == _memory(alias)
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
    )


def _is_opaque(value: Any) -> bool:
    """Whether the attributes of an object are no state of a model's: a class, a function, an object
    of Python's library or of ours."""
    kind = type(value)
    if isinstance(value, (type, torch.Generator)) or hasattr(kind, "__code__"):
        return True
    top = kind.__module__.partition(".")[0]
    is_librarys = top in sys.stdlib_module_names and kind is not SimpleNamespace
    return is_librarys or top in ("numpy", __name__.partition(".")[0])


def _restore_dict(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = [*dict.items(value)]
    if len(now) == len(items) and all(
        a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)
    ):
        return
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)


def _restore_items(value: Any, before: list[Any]) -> None:
    if len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True)):
        return
    if isinstance(value, list):
        list.__setitem__(value, slice(None), before)
    elif isinstance(value, bytearray):
        value[:] = bytes(before)
    else:
        base = deque if isinstance(value, deque) else set
        base.clear(value)
        (deque.extend if base is deque else set.update)(value, before)


def _restore_slot(value: Any, name: str, item: Any) -> None:
    if getattr(value, name, None) is not item:
        object.__setattr__(value, name, item)


def random_states() -> tuple[Any, ...]:
    """Where the global random number generators are."""
    numpy = sys.modules.get("numpy")
    words = None if numpy is None else numpy.random.get_state()
    return torch.get_rng_state(), random.getstate(), words


def has_drawn(before: tuple[Any, ...]) -> bool:
    """Whether somebody has drawn from a global generator since."""
    numbers, drawn, words = before
    numpy = sys.modules.get("numpy")
    if numpy is not None and words is not None:
        now = numpy.random.get_state()
        if now[2:] != words[2:] or not (now[1] == words[1]).all():
            return True
    return not torch.equal(torch.get_rng_state(), numbers) or random.getstate() != drawn


def _restore_random(before: tuple[Any, ...]) -> None:
    """Put global generators back where they were moved; others may draw from them meanwhile."""
    numbers, drawn, words = before
    if not torch.equal(torch.get_rng_state(), numbers):
        torch.set_rng_state(numbers)
    if random.getstate() != drawn:
        random.setstate(drawn)
    numpy = sys.modules.get("numpy")
    if numpy is not None and words is not None:
        numpy.random.set_state(words)


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among its arguments that an operator says to write to."""
    given = _by_name(func, args, kwargs)
    uses = uses_of(func)
    written = [given.get(name) for name in uses.names if name in uses.written]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]


class _Writes(OwnDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_to(func, args, kwargs):
            self._state.keep(tensor)
        given = _by_name(func, args, kwargs)
        if any(given.get(name) is True for name in _TRAINING):
            for leaf in map(given.get, _STATISTICS):
                if isinstance(leaf, Tensor):
                    self._state.keep(leaf)
        return func(*args, **kwargs)
