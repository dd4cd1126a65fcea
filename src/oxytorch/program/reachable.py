"""The Python state that a run of a module's code can have read, and whether it is what it was.

A recording of a whole module holds what its Python decided. It decided by the attributes of the
modules, by what these hold (configurations, lists, dictionaries), by global variables, by what
closures and classes hold, and by tensors. All of that can be reached from the modules and from the
code that ran, and is compared by identity before each use of the recording. It decided by what it
asked for and did not find as well (`getattr` with a default, `hasattr`): so every table that it can
have asked is counted, and a global variable that it names and that is not there is looked for, as
is a name of torch's, unless its code looks names up. What cannot be reached (files, the clock, the
environment) is only read through functions of Python's library, and code that calls those is
refused.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import gc
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import _GeneratorContextManager
from contextvars import ContextVar
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import config
from ..core.layer_functions import functions_of
from ..core.packed import PackedTensor
from ..core.sources import GLOBAL_HOOKS, MISSING, Places
from ..core.watched import PLAIN
from ..core.words import has_no_attributes
from ..graph.errors import CaptureError
from .before import is_equal
from .code_names import global_names, imported_names
from .codes import Codes, is_pythons
from .inputs import ModuleCall
from .outputs import containers


class _Pair(NamedTuple):
    first: int


_OPAQUE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, types.BuiltinFunctionType, types.CodeType,
    logging.Logger, type(NotImplemented), type(...), property, staticmethod,
    types.UnionType, type(_Pair.first),
)  # fmt: skip
"""What holds nothing that a module's code reads through it, or holds it for good."""

_NUMBERS = (int, float, complex, str, bytes)

_COLLECTIONS = (tuple, frozenset, dict, list, set)

_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
"""Of dictionaries, which may also be read and written under another name."""

_MOVING = (Iterator, bytearray, memoryview)
"""Built-in kinds whose state nothing shows that could be compared."""

_LIBRARIES = frozenset(["torch", "oxytorch", "builtins", "threading", "_thread", "_abc"])

_MOST = 50_000
"""Places to look at, above which looking would cost what a recording saves."""

_UNREAD = nn.Module().__dict__.keys() - {
    "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
}  # fmt: skip
"""Torch's own tables that a call in plain inference does not look at."""

_OF_TENSORS = frozenset(["grad", "requires_grad"])
"""What can be set on a tensor and is no value of it."""

_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")


def _is_number(value: Any) -> bool:
    """Whether a value is one of NumPy's numbers or types, which cannot change."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype))


class Reachable:
    """What can be reached from a module and from the code that it ran, as it is now.

    may_unpack: whether packed weights that are out now may be packed and taken out again, as they
        are at each call of code that takes views of them. No count tells of writes through views:
        their values are compared. Else a weight that cannot be packed is not what it was.

    Raises CaptureError where something of it cannot be compared.
    """

    def __init__(self, module: nn.Module, codes: Codes, may_unpack: bool = False) -> None:
        self._home = module
        self._may_unpack = may_unpack
        self._places = Places()
        self._packed: list[PackedTensor] = []
        self._values: list[tuple[PackedTensor, Tensor]] = []
        self._absent: list[tuple[Any, str]] = []
        self._variables: list[tuple[ContextVar[Any], Any]] = []
        self._seen: dict[int, Any] = {}
        self._names = {name for code in codes.seen for name in code.co_names}.union(_CALLS)
        self._all_names = codes.looks_up_names
        self._reads_environment = codes.reads_environment
        self._reads_functions = codes.reads_functions
        self._codes = {*codes.seen}
        self._read = {*codes.seen, *codes.read}
        self._looked_into: set[int] = set()
        self._todo: list[Any] = [module]
        for code, table in codes.seen.items():
            reads_table = self._all_names and "globals" in code.co_names
            names = global_names(code)
            for name in [*table] if reads_table else sorted(names.intersection(table)):
                self._entry(table, name)
            if reads_table:
                self._count(table)
            for name in names.difference(table):
                for place in (table, vars(builtins)):
                    self._places.entries.append((place, name, place.get(name, MISSING)))
            for name in imported_names(code, table):
                self._import(name)
        if codes.reads_environment:
            self._todo.append(config.environment)
        while self._todo:
            self._visit(self._todo.pop())
            if len(self._places) > _MOST:
                raise CaptureError("its code can read too many objects")
        self._places.sizes += [(hooks, len(hooks)) for hooks in GLOBAL_HOOKS]
        self._places.close()

    def is_current(self) -> bool:
        """Whether nothing was replaced, added, removed or written to."""
        return (
            self._places.are_current()
            and all(variable.get(MISSING) is value for variable, value in self._variables)
            and not any(_is_there(owner, name) for owner, name in self._absent)
            and all(map(PackedTensor.is_packed, self._packed))
            and all(is_equal(weight.values(), values) for weight, values in self._values)
        )

    def without_values(self) -> Reachable:
        """The same, for who follows writes to tensors: these may happen."""
        found = copy(self)
        found._places = self._places.without_values()
        return found

    def covers(self, codes: Codes) -> bool:
        """Whether what such code can read is looked at."""
        return (
            codes.refusal is None
            and codes.seen.keys() <= self._codes
            and codes.read <= self._read
            and codes.reads_functions <= self._reads_functions
            and codes.looks_up_names <= self._all_names
            and codes.reads_environment <= self._reads_environment
        )

    def holds(self, value: Any) -> bool:
        """Whether this very object can be reached."""
        return self._seen.get(id(value)) is value

    def holds_any(self, values: Iterable[Any]) -> bool:
        """Whether one of these very objects can be reached."""
        return any(map(self.holds, values))

    def holds_arguments(self, call: ModuleCall) -> bool:
        """Whether code can reach what it is called with by another way, too.

        A record of the call does not tell which way it took; and code may ask whether both are one.
        """
        return self.holds_any(call.tensors) or self.holds_any(containers((call.args, call.kwargs)))

    def _entry(self, table: dict[Any, Any], key: Any) -> None:
        self._places.entries.append((table, key, table[key]))
        self._todo.append(table[key])

    def _attribute(self, owner: Any, name: str, value: Any) -> None:
        self._places.attributes.append((owner, name, value))
        self._todo.append(value)

    def _count(self, table: Any) -> None:
        self._places.sizes.append((table, len(table)))

    def _import(self, name: str) -> None:
        """A module that code can import while it runs, with those that hold it. What was not
        imported yet was not read either."""
        is_there = name in sys.modules
        while name:
            found = sys.modules.get(name, MISSING)
            self._places.entries.append((sys.modules, name, found))
            if is_there and found is not MISSING and not _is_of_library(found):
                self._todo.append(found)
            name = name.rpartition(".")[0]

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or _is_number(value):
            return
        if isinstance(value, logging.Logger):
            self._logger(value)
            return
        is_opaque = isinstance(value, _OPAQUE)
        if is_opaque and (not isinstance(value, _NUMBERS) or not hasattr(value, "__dict__")):
            return
        self._seen[id(value)] = value  # which keeps the id valid
        if is_opaque:
            self._object(value)  # a number of a class of the user's, with attributes
            return
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, _COLLECTIONS):
            self._collection(value)
            self._object(value)
        elif isinstance(value, _VIEWS):
            self._todo += gc.get_referents(value)  # the dictionary, or what stands for one
        else:
            self._other(value)

    def _collection(self, value: Any) -> None:
        """What it holds, of which the kinds that can change are compared later."""
        if isinstance(value, dict):
            self._dictionary(value)
            return
        if isinstance(value, list):
            self._places.lists.append((value, [*value]))
        elif isinstance(value, set):
            self._places.sets.append((value, [*value]))
        self._todo += value

    def _other(self, value: Any) -> None:
        """Functions, classes, modules of Python, and objects of users' classes."""
        kind = type(value)
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, ContextVar):
            self._variables.append((value, value.get(MISSING)))
            self._todo.append(value.get(None))
        elif isinstance(value, types.MethodType):
            self._todo += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):  # which `__setstate__` replaces
                self._attribute(value, name, getattr(value, name))
        elif isinstance(value, _CACHED):
            self._cached(value)
        elif isinstance(value, weakref.ref):
            self._todo.append(value())  # which is kept, and cannot go away
        elif isinstance(value, types.ModuleType):
            self._python_module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, _GeneratorContextManager):
            # A decorator makes a new generator at each call; one in a `with` serves once.
            self._todo += [value.func, value.args, value.kwds]
        elif isinstance(value, threading.local):
            raise CaptureError("its code can read what differs from thread to thread")
        elif isinstance(value, _MOVING):
            raise CaptureError(f"its code can read a {kind.__name__}, which cannot be compared")
        elif kind.__module__.split(".")[0] not in _LIBRARIES:
            self._object(value)
            if not (hasattr(value, "__dict__") or hasattr(kind, "__slots__") or callable(value)):
                raise CaptureError(f"its code can read a {kind.__name__}, which cannot be compared")

    def _logger(self, logger: logging.Logger | None) -> None:
        """What decides whether it takes a message, which code may ask it."""
        while logger is not None:
            manager, own = logger.manager.__dict__, logger.__dict__
            self._places.entries.append((manager, "_disable", manager["_disable"]))
            for name in ("level", "disabled", "parent"):
                self._places.entries.append((own, name, own[name]))
            logger = logger.parent

    def _python_module(self, module: types.ModuleType) -> None:
        table = module.__dict__
        if _is_of_torch(module) and not self._all_names:  # it loads parts of itself one by one
            self._places.entries += [(table, n, table.get(n, MISSING)) for n in self._names]
            return
        # Every line of a notebook adds a name, and libraries of modules load them one by one.
        if type(module) is types.ModuleType and module.__name__ != "__main__":
            self._count(table)
        for name in self._names & table.keys():
            if isinstance(table[name], _OPAQUE) or _is_of_torch(module):
                self._places.entries.append((table, name, table[name]))
            else:
                self._entry(table, name)

    def _tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, PackedTensor):
            self._packed_weight(tensor)
        else:
            self._places.add_tensor(tensor)
        for name in _OF_TENSORS & self._names:
            self._places.attributes.append((tensor, name, getattr(tensor, name)))
        self._dictionary(tensor.__dict__)
        self._class(type(tensor))
        if type(tensor) not in PLAIN and not isinstance(tensor, PackedTensor):
            raise CaptureError(f"its code can read a {type(tensor).__name__}")

    def _packed_weight(self, weight: PackedTensor) -> None:
        # `torch.utils.swap_tensors` leaves nothing of a tensor but the object.
        self._places.attributes.append((weight, "__dict__", weight.__dict__))
        if self._may_unpack and weight.cell.is_out:
            self._places.formed.append(weight)
            self._values.append((weight, weight.values().clone()))
            return
        self._places.add_tensor(weight)
        if not self._may_unpack:
            self._packed.append(weight)

    def _module(self, module: nn.Module) -> None:
        for name, value in module.__dict__.items():
            if name.startswith("_oxytorch"):
                continue
            if name == "forward":
                # Whose own the recording's is to be; other ones of ours look after themselves.
                if module is not self._home:
                    self._places.entries.append((module.__dict__, name, value))
                    self._todo += [] if _is_ours(value) else [value]
            elif name not in _UNREAD:
                self._entry(module.__dict__, name)
        self._count(module.__dict__)
        self._places.add_order(module.__dict__)
        for _, name in functions_of(type(module)):
            self._places.entries.append((vars(functional), name, vars(functional)[name]))
        self._places.types.append((module, type(module)))
        self._class(type(module))

    def _dictionary(self, found: Any) -> None:
        self._places.add_dictionary(found)
        self._todo += dict.values(found)
        self._todo += [key for key in dict.keys(found) if type(key) is not str]

    def _function(self, function: types.FunctionType) -> None:
        if _is_of_torch(function):
            return
        self._attributes(function)
        code = function.__code__
        if self._reads_functions or code in self._read or is_pythons(code.co_filename):
            self._look_into(function)

    def _look_into(self, function: types.FunctionType) -> None:
        """What decides what a function does, which matters where it is called."""
        if id(function) in self._looked_into or _is_of_torch(function):
            return
        self._looked_into.add(id(function))
        self._places.add_function(function)
        self._todo += [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                self._attribute(cell, "cell_contents", cell.cell_contents)
                if isinstance(cell.cell_contents, types.FunctionType):
                    self._look_into(cell.cell_contents)  # whose code a decorator may ask
            except ValueError:  # empty as yet
                self._absent.append((cell, "cell_contents"))

    def _attributes(self, value: Any) -> None:
        """The attributes that an object itself has. Python makes the dictionary for them when it is
        asked for: none is made here."""
        if has_no_attributes(value):
            self._places.bare.append(value)
        else:
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._seen[id(own)] = own
                self._dictionary(own)

    def _cached(self, function: Any) -> None:
        """A function whose code need not have run, since its results are kept: what that reads."""
        self._object(function)
        todo, known = [function.__wrapped__], {*self._codes}
        while todo:
            inner = todo.pop()
            is_function = isinstance(inner, types.FunctionType)
            if not is_function or inner.__code__ in known or _is_of_library(inner):
                continue
            known.add(inner.__code__)
            self._look_into(inner)
            for name in inner.__code__.co_names:
                if name in inner.__globals__:
                    self._entry(inner.__globals__, name)
                    todo.append(inner.__globals__[name])

    def _object(self, value: Any) -> None:
        """The attributes of an object."""
        self._attributes(value)
        kind = type(value)
        if kind.__module__ == "builtins":
            return
        self._places.types.append((value, kind))
        for slots in (vars(owner).get("__slots__", ()) for owner in kind.__mro__):
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name in ("__dict__", "__weakref__"):
                    continue
                if hasattr(value, name):
                    self._attribute(value, name, getattr(value, name))
                else:
                    self._absent.append((value, name))
        self._class(kind)

    def _class(self, kind: type) -> None:
        """What the code can find in a class."""
        if id(kind) in self._seen and self._seen[id(kind)] is _DONE:
            return
        self._seen[id(kind)] = _DONE
        self._class(type(kind))
        for name in ("__mro__", "__name__"):
            found = getattr(kind, name)
            if found is getattr(kind, name):  # not of a class in C, whose name cannot change
                self._places.attributes.append((kind, name, found))
        for owner in kind.__mro__:
            table = _table_of(owner)
            if id(table) not in self._seen and owner.__module__ != "builtins":
                self._seen[id(table)] = table
                copyreg._slotnames(owner)  # type: ignore[attr-defined]  # else the first copy adds it
                self._count(table)
        is_library = _is_of_library(kind)
        for name in () if is_library else self._in_class(kind):
            self._descriptor(kind, name)
        for name in _CALLS if is_library else self._in_class(kind):
            found = getattr(kind, name, None)
            if found is None or found is not getattr(kind, name):  # created at each access
                continue
            if is_library:
                self._places.attributes.append((kind, name, found))
            else:
                self._attribute(kind, name, found)

    def _descriptor(self, kind: type, name: str) -> None:
        """What gives the value of an attribute, and what that keeps."""
        raw = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        if isinstance(raw, property):
            self._todo += [raw.fget, raw.fset]
        elif raw is not None and not isinstance(raw, _GIVEN) and hasattr(type(raw), "__get__"):
            self._todo.append(raw)

    def _in_class(self, kind: type) -> set[str]:
        """The names that the code can find in a class."""
        names = {name for owner in kind.__mro__ if not _is_of_torch(owner) for name in vars(owner)}
        if self._all_names:
            return {name for name in names if not name.startswith("__")}.union(_CALLS)
        return names & self._names


_DONE = object()
_GIVEN = (
    types.FunctionType, types.BuiltinFunctionType, types.GetSetDescriptorType, staticmethod,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, classmethod, type,
)  # fmt: skip
"""What lies in classes and is looked at as what it gives."""
_CACHED = type(functools.lru_cache(abs))


def _is_there(owner: Any, name: str) -> bool:
    """Whether an attribute or the content of a cell has been set."""
    try:
        getattr(owner, name)
    except (AttributeError, ValueError):
        return False
    return True


def _table_of(kind: type) -> dict[str, Any]:
    """The dictionary of a class, of which Python itself shows a view only."""
    found = gc.get_referents(vars(kind))
    if len(found) != 1 or type(found[0]) is not dict:
        raise CaptureError(f"its code can read the class {kind.__name__}, which cannot be compared")
    return found[0]


def _is_of_torch(value: Any) -> bool:
    name = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(name).split(".")[0] in ("torch", "oxytorch")


def _is_of_library(value: Any) -> bool:
    """Whether a class or function is one of torch, this package or Python's library."""
    name = getattr(value, "__module__", None)
    if type(name) is not str:  # of a class of Cython's it is a descriptor
        name = value.__name__
    return _is_of_torch(value) or name.split(".")[0] in sys.stdlib_module_names


def _is_ours(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "oxytorch"
