"""Which code may be passed over: code whose only effect and only inputs are values of tensors.

A region runs the operators of a module without its Python. That is sound where the Python only
computes: it keeps no state, opens no context, catches no error, and reads nothing that may change
unseen. The code objects of a real run are looked at, and the built-in functions that they call.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import logging
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from .. import _garbage
from .errors import CaptureError
from .torch_code import (
    WRAPPERS,
    in_torch,
    is_library,
    is_library_or_pythons,
    is_pythons,
    is_stateful,
    is_stateful_code,
    is_torchs,
)

_PURE_MODULES = frozenset(
    ["abc", "collections", "copy", "dataclasses", "enum", "functools", "inspect", "math",
     "operator", "types", "typing"]
)  # fmt: skip
"""Modules of Python's library whose functions only compute."""

_REFUSED = {
    "STORE_ATTR": "sets an attribute",
    "DELETE_ATTR": "deletes an attribute",
    "STORE_GLOBAL": "sets a global variable",
    "DELETE_GLOBAL": "deletes a global variable",
    "BEFORE_WITH": "opens a context",
    "SETUP_WITH": "opens a context",
    "LOAD_SPECIAL": "opens a context",
    "PUSH_EXC_INFO": "catches errors",
    "SETUP_FINALLY": "catches errors",
    "IMPORT_NAME": "imports a module",
}
"""Instructions of which each has an effect, or depends on one, that a record does not show.
Elements are written to in containers that the code has made; those given to it are compared."""

_READS_IN_TEXT = re.compile(r"\{[^{}:!]*[.\[]")
"""Of texts that `str.format` reads attributes and elements by."""

_READERS = ("__getattribute__", "__getattr__")
UNSEEN = frozenset(
    ["_version", "_cdata", "is_inference", "_base", "_is_view", "is_shared", "default_factory",
     "getweakrefcount", "getweakrefs", "getrefcount"]
)  # fmt: skip
"""What is read of tensors without torch's notice, and of other objects without ours."""

_PURE = frozenset(
    ["abs", "all", "any", "bool", "callable", "divmod", "enumerate", "filter", "float", "format",
     "hash", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min",
     "next", "pow", "range", "repr", "reversed", "round", "sorted", "str", "sum", "tuple", "type",
     "zip", "append", "extend", "insert", "items", "keys", "values", "get", "copy", "count",
     "index", "join", "split", "startswith", "endswith", "strip", "lower", "upper", "replace",
     "isdigit", "sqrt", "floor", "ceil", "prod", "exp", "log", "pi", "partial", "update",
     "setdefault", "add", "pop"]
)  # fmt: skip
"""Built-in functions and methods that only compute, or change what the code itself has made."""

_SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
)  # fmt: skip
_CALLABLE = (
    types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType, logging.Logger,
)  # fmt: skip


_OF_CLASSES = (types.FunctionType, property, classmethod, staticmethod)
"""What classes hold whose code is looked at when it runs."""
_STATELESS = (*_CALLABLE, types.MethodType, torch.Tensor, nn.Module)
"""What is looked at by itself, and not as an object that code is given."""

_CACHED = type(functools.lru_cache(abs))
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def hidden_state(value: Any) -> str:
    """What a callable object keeps that neither its code shows nor `Sources` compares; "" if that
    is nothing."""
    if isinstance(value, _CACHED):
        return "results of earlier calls"
    if isinstance(value, (operator.attrgetter, operator.itemgetter, operator.methodcaller)):
        return "names of what it reads"
    if isinstance(value, _BOUND):
        is_known = isinstance(value.__self__, (types.ModuleType, type, nn.Module))
        kind = type(value.__self__).__name__
        return "" if is_known or is_constant(value.__self__) else f"a {kind}, which may change"
    if not isinstance(value, functools.partial):
        return ""
    if not all(map(is_constant, (*value.args, *value.keywords.values()))):
        return "arguments, which may change"
    return hidden_state(value.func)


def is_constant(value: Any) -> bool:
    """Whether a value cannot change. One of a class of the user's may have attributes that can."""
    if isinstance(value, _SIMPLE):
        return not hasattr(value, "__dict__") or isinstance(value, enum.Enum)
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value)) and not hasattr(value, "__dict__")
    return False


def keeps_state(value: Any) -> bool:
    """Whether a value is an object of the user's, whose methods may read what changes."""
    if is_constant(value) or isinstance(value, _STATELESS):
        return False
    # Python's own describe functions and classes, but for those that hold values.
    return not type(value).__module__.startswith(("builtins", "inspect", "torch."))


def can_watch() -> bool:
    """Whether `watched` works: not beside a profiler that could not be continued afterwards."""
    before = sys.getprofile()
    return before is None or callable(before) or hasattr(before, "enable")


def stop_watching() -> Any:
    """Have nobody in Python be told of calls on this thread; what `go_on_watching` takes."""
    watch = sys.getprofile()
    if not callable(watch):
        return None
    sys.setprofile(None)
    return watch


def go_on_watching(watch: Any) -> None:
    """Undo what `stop_watching` did."""
    if watch is not None:
        sys.setprofile(watch)


@contextmanager
def watched(note: Callable[[types.FrameType, str, Any], None]) -> Iterator[None]:
    """Tell `note` of the calls on this thread, as `sys.setprofile` does.

    Python's garbage collector is paused: what it runs belongs to objects of others. Other profilers
    pause, too. Raises CaptureError where one cannot be continued (`torch.profiler` with stacks).
    """
    before = sys.getprofile()
    if not can_watch():
        raise CaptureError(f"a profiler watches it ({type(before).__name__})")
    with _garbage.paused():
        sys.setprofile(note)
        try:
            yield
        finally:
            if before is None or callable(before):
                sys.setprofile(before)
            else:
                before.enable()  # cProfile


class CodeWatch:
    """Looks at the Python that runs on this thread, and reports what must not be passed over.

    refuse: called with the reason at the time.
    reads: called with each global variable that is read: its Python module's name and its own.
    module: returns the module whose code is running.
    finds: called with each name that the code finds in the module's class.
    looks_into: called with (object, name) that it reads in an attribute of the module's (a
        configuration).
    """

    def __init__(
        self,
        refuse: Callable[[str], None],
        reads: Callable[[str, str], None],
        module: Callable[[], nn.Module],
        finds: Callable[[str], None] = lambda name: None,
        looks_into: Callable[[Any, str], None] = lambda value, name: None,
        around: Mapping[types.CodeType, Callable[[types.FrameType, str, Any], None]] | None = None,
    ) -> None:
        self._refuse = refuse
        self._reads = reads
        self._module = module
        self._finds = finds
        self._looks_into = looks_into
        self._around = around or {}
        self.is_looking = True
        self.branches = False  # whether code was seen that decides something
        self.attributes: set[str] = set()  # what the code reads, also where it did not run

    def watching(self) -> AbstractContextManager[None]:
        return watched(self._note)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """While code runs that is not the model's."""
        before, self.is_looking = self.is_looking, False
        watch = stop_watching()  # it would take longer to be told of that than it runs
        try:
            yield
        finally:
            self.is_looking = before
            go_on_watching(watch)

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if not self.is_looking:
            return
        if event in ("call", "return") and frame.f_code in self._around:
            self._around[frame.f_code](frame, event, argument)
        if event == "call":
            filename = frame.f_code.co_filename
            if is_library(filename):
                if _is_of_model(caller_of(frame)) and is_stateful_code(frame.f_code):
                    self._refuse(f"its code calls {frame.f_code.co_name} of torch")
                return
            if not is_pythons(filename):
                self._look(frame)
            elif frame.f_back is not None and not is_library(frame.f_back.f_code.co_filename):
                name = frame.f_globals.get("__name__", "?")
                if not is_pythons(frame.f_back.f_code.co_filename) and (
                    name not in _PURE_MODULES or any(map(keeps_state, _arguments_of(frame)))
                ):
                    self._refuse(f"its code calls {name}.{frame.f_code.co_name}")
        elif event == "c_call" and not is_library_or_pythons(frame.f_code.co_filename):
            name = getattr(argument, "__name__", "?")
            is_known = is_torchs(argument) or (name in _PURE and not _reads_in_text(argument))
            if is_stateful(argument) or not is_known:
                self._refuse(f"its code calls {name}")

    def _look(self, frame: types.FrameType) -> None:
        code = frame.f_code
        reason, branches, global_names, free_names, attributes = _instructions(code)
        self.branches |= branches
        self.attributes.update(attributes)
        if reason is not None:
            self._refuse(f"its code {reason}")
        self._look_at_globals(frame.f_globals, global_names, attributes)
        for name in free_names:
            value = frame.f_locals.get(name)
            if name != "__class__" and not callable(value) and not _is_of_caller(frame, name):
                self._refuse(f"its code reads {name} of an enclosing function")
            self._refuse_hidden(name, value)
        own = self._module().__dict__.values()
        held: list[Any] = []  # arguments that are attributes of the module
        for value in filter(keeps_state, _arguments_of(frame)):
            if any(value is attribute for attribute in own):
                held.append(value)
            elif any(hasattr(type(value), name) or _has(value, name) for name in attributes):
                self._refuse(f"its code reads what a {type(value).__name__} keeps")
        self._look_at_attributes(frame, global_names, attributes, held)
        for default in _defaults_of(frame):
            if not (is_constant(default) or callable(default)):
                self._refuse(f"its code reads a default of {code.co_name} that may change")

    def _look_into_class(self, value: Any, attributes: tuple[str, ...]) -> None:
        """Look at what the code of a configuration finds in its class alone."""
        kind = type(value)
        for name in attributes:
            holder = next((one for one in kind.__mro__ if name in vars(one)), None)
            if holder in (None, object) or _has(value, name):
                continue
            if not isinstance(vars(holder)[name], _OF_CLASSES):
                self._refuse(f"its code reads {name} of {kind.__name__}, which may change")

    def _look_at_globals(
        self, table: dict[str, Any], names: tuple[str, ...], attributes: tuple[str, ...]
    ) -> None:
        for name in names:
            if name not in table:
                continue  # a built-in name
            owner = str(table.get("__name__"))
            if getattr(sys.modules.get(owner), "__dict__", None) is not table:
                self._refuse(f"its code reads {name} of a module that is not imported")
            self._look_at_global(owner, name, table[name], attributes)

    def _look_at_global(
        self, owner: str, name: str, value: Any, attributes: tuple[str, ...], outer: str = ""
    ) -> None:
        """Look at a global variable, and where it is a module at those that are read of it."""
        if not (is_constant(value) or isinstance(value, _CALLABLE) or callable(value)):
            self._refuse(f"its code reads the global variable {outer}{name}")
        self._refuse_hidden(name, value)
        self._reads(owner, name)
        if isinstance(value, types.ModuleType) and value.__name__ != owner:
            of_torch = value.__name__.partition(".")[0] == "torch"
            for inner in attributes:
                if inner in value.__dict__ and of_torch:
                    self._reads(value.__name__, inner)
                elif inner in value.__dict__:
                    found = value.__dict__[inner]
                    self._look_at_global(value.__name__, inner, found, attributes, f"{name}.")

    def _look_at_attributes(
        self,
        frame: types.FrameType,
        global_names: tuple[str, ...],
        attributes: tuple[str, ...],
        held: list[Any],
    ) -> None:
        own = self._module()
        kind: Any = type(own)
        known: set[str] = set()
        for name in global_names:
            value = frame.f_globals.get(name)
            if type(value) is types.ModuleType and "__dir__" not in vars(value):
                known.update(filter(vars(value).__contains__, attributes))
            elif isinstance(value, (types.ModuleType, logging.Logger)):
                known.update(dir(value))
        for value in held:  # a configuration's own code
            self._look_into(value, type(value).__name__, attributes)
            if frame.f_code.co_name != "__getattribute__":  # of names that its callers have
                self._look_into_class(value, attributes)
            known.update(dir(value))
        for name in attributes:
            if name in own.__dict__:
                known |= self._look_into(own.__dict__[name], name, attributes)
        for name in attributes:
            if name in own.__dict__ or name in known or _holds(own, name):
                continue
            if name in _own_names(kind):
                self._finds(name)
                self._refuse_hidden(name, getattr(kind, name, None))
            elif name in _own_attributes(frame.f_code) and not hasattr(kind, name):
                self._finds(name)  # not there, so that what reads it did not run
            elif holders := [
                m for m in own._modules.values() if m is not None and name in m.__dict__
            ]:
                for holder in holders:
                    if not is_constant(holder.__dict__[name]):
                        self._refuse(f"its code reads {name} of a module below it")
                    self._looks_into(holder, name)
            elif name not in _attributes_of(kind):
                self._refuse(f"its code reads {name} of another object")

    def _refuse_hidden(self, name: str, value: Any) -> None:
        if state := hidden_state(value):
            self._refuse(f"its code calls {name}, which keeps {state}")

    def _look_into(self, value: Any, name: str, attributes: tuple[str, ...]) -> set[str]:
        """Look at an attribute of the module; of a configuration, return the names that it has."""
        self._refuse_hidden(name, value)
        if is_constant(value) or isinstance(value, (*_CALLABLE, nn.Module)):
            return set()
        inside = getattr(value, "__dict__", None)
        if inside is None or isinstance(value, (torch.Tensor, dict, list, set)):
            self._refuse(f"its code reads the attribute {name}, which may change")
            return set()
        found = {own for own in attributes if own in inside}
        for own in found:
            if not is_constant(inside[own]):
                self._refuse(f"its code reads {name}.{own}, which may change")
            self._looks_into(value, own)
        return found


def _is_of_caller(frame: types.FrameType, name: str) -> bool:
    """Whether a variable of an enclosing function is one of the running forward's own: of a
    comprehension or a function that it defines."""
    caller = frame.f_back
    while caller is not None and not is_library(caller.f_code.co_filename):
        if name in caller.f_code.co_cellvars:
            return True
        caller = caller.f_back
    return False


def _arguments_of(frame: types.FrameType) -> list[Any]:
    """The arguments that a call of Python code has just been given."""
    code, given = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    found = [given.get(name) for name in code.co_varnames[:count]]
    rest = iter(code.co_varnames[count:])
    if code.co_flags & inspect.CO_VARARGS:
        found += given.get(next(rest), ())
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found += given.get(next(rest), {}).values()
    return found


def _defaults_of(frame: types.FrameType) -> list[Any]:
    """The defaults of the function that runs, where it is found by its name."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for found in (frame.f_globals.get(code.co_name), getattr(type(first), code.co_name, None)):
        if getattr(found, "__code__", None) is code:
            named = getattr(found, "__kwdefaults__", None) or {}
            return [*(getattr(found, "__defaults__", None) or ()), *named.values()]
    return []


def _has(value: Any, name: str) -> bool:
    return name in getattr(value, "__dict__", ())


@functools.lru_cache(maxsize=4096)
def _instructions(
    code: types.CodeType,
) -> tuple[str | None, bool, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Why a code object is refused, whether it decides anything, and the global, enclosing and
    attribute names that it reads."""
    reason, branches = None, False
    global_names, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        is_unseen = instruction.argval in UNSEEN or instruction.argval == "__dict__"
        if instruction.argval in _READERS and code.co_name not in _READERS:
            is_unseen = True
        if name in ("LOAD_ATTR", "LOAD_METHOD") and is_unseen and reason is None:
            reason = f"reads {instruction.argval}"
        branches |= ("JUMP" in name and "IF" in name) or name == "FOR_ITER"
        if name in _REFUSED and reason is None:
            reason = _REFUSED[name]
        elif name == "STORE_DEREF" and instruction.argval in code.co_freevars and reason is None:
            reason = "sets a variable of an enclosing function"
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_names.add(instruction.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    return reason, branches, tuple(global_names), code.co_freevars, tuple(attributes)


@functools.lru_cache(maxsize=4096)
def _own_attributes(code: types.CodeType) -> frozenset[str]:
    """The attributes that code reads of its first argument alone."""
    if not code.co_argcount:
        return frozenset()
    own: set[str] = set()
    others: set[str] = set()
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            is_first = before is not None and before.opname.startswith("LOAD_FAST")
            is_own = is_first and before.argval == code.co_varnames[0]
            (own if is_own else others).add(instruction.argval)
        before = instruction
    return frozenset(own - others)


@functools.lru_cache(maxsize=4096)
def _attributes_of(kind: type) -> frozenset[str]:
    """The attributes that code may read without a look at the object: those of tensors, of torch's
    modules and of plain Python values, and the methods of its own class."""
    known = (torch.Tensor, torch, torch.nn.functional, nn, math, str, list, dict, tuple, torch.Size)
    found = {name for owner in known for name in dir(owner)}
    own = (name for name in dir(kind) if callable(getattr(kind, name, None)))
    return frozenset(found.union(own))


@functools.lru_cache(maxsize=4096)
def _own_names(kind: type) -> frozenset[str]:
    """The methods and constants that a class of the user's has of its own."""
    return frozenset(
        name
        for owner in kind.__mro__
        if not owner.__module__.startswith(("torch.", "builtins"))
        for name, value in owner.__dict__.items()
        if (callable(value) or is_constant(value)) and name != "forward" and name[:2] != "__"
    )


def _holds(module: nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name in module._modules


def _reads_in_text(function: Any) -> bool:
    """Whether a built-in function is the `format` of a text that may name attributes."""
    if getattr(function, "__name__", "") != "format" or function is format:
        return False
    text = getattr(function, "__self__", None)
    return not isinstance(text, str) or _READS_IN_TEXT.search(text) is not None


def _is_of_model(frame: types.FrameType | None) -> bool:
    """Whether a frame is of the model's own code."""
    return frame is not None and not is_library_or_pythons(frame.f_code.co_filename)


def caller_of(frame: types.FrameType) -> types.FrameType | None:
    """The frame that called, past torch's wrappers around functions."""
    found = frame.f_back
    while found is not None and in_torch(found.f_code).startswith(WRAPPERS):
        found = found.f_back
    return found
