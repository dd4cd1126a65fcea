"""The code that a run of a module runs, and what of it reads or changes what nothing shows."""

from __future__ import annotations

import dis
import functools
import os
import re
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

from ..core.layer_functions import TORCH as _TORCH
from ..graph.code import UNSEEN, caller_of, watched
from ..graph.torch_code import is_stateful, is_stateful_code

_LAYERS = os.path.join(_TORCH, "nn") + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_REGION = "<oxytorch region>"
_OF_SYMBOLS = re.compile(r"[/\\](sympy|mpmath)[/\\]")  # by which torch computes with symbols
_PYTHON = os.path.dirname(os.__file__) + os.sep

_PURE_LIBRARY = frozenset(
    ["abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "importlib",
     "inspect", "itertools", "logging", "math", "operator", "re", "types", "typing", "warnings",
     "weakref"]
)  # fmt: skip
"""Modules of Python's library whose functions give the same for the same arguments."""

_PURE_C = frozenset(
    ["builtins", "math", "_operator", "operator", "itertools", "_functools", "functools",
     "_collections", "collections", "_abc", "_contextvars", "_warnings",
     "_weakref", "_struct", "_sre", "re"]
)  # fmt: skip
_REFUSED_C = frozenset(["print", "input", "open", "breakpoint", "exec", "eval"])

_IMPORT, _IMPORTER = "_find_and_load", "<frozen importlib._bootstrap>"

_FINDERS = frozenset(["importlib", "importlib.util", "importlib.metadata", "importlib.resources"])
"""Modules that look for others among files, or load them by a name that the code does not show."""

_READS_OF_ENVIRONMENT = frozenset(
    ["__getitem__", "__contains__", "get", "getenv", "encode", "decode", "check_str", "encodekey"]
)

_LOOK_UPS = frozenset(["getattr", "hasattr", "vars", "dir", "globals", "locals"])

_OF_FUNCTIONS = frozenset(
    ["__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__"]
)
"""By which code reads a function that it does not call."""

_IMPURE = frozenset(
    ["asyncio", "datetime", "fcntl", "glob", "io", "json", "multiprocessing", "os",
     "pathlib", "pickle", "posixpath", "queue", "random", "secrets", "select", "shutil", "signal",
     "socket", "subprocess", "sys", "tempfile", "time", "urllib", "uuid"]
)  # fmt: skip
"""Modules of Python's library whose functions read or change what lies outside of the program."""
_CALLBACKS = {("_weakrefset", "_remove"), ("weakref", "remove")}
"""Functions that run wherever an object that a weak set or dictionary held goes."""


class Codes:
    """The code that runs on this thread, apart from Python's library and this package."""

    def __init__(self) -> None:
        self.seen: dict[types.CodeType, dict[str, Any]] = {}  # with its global variables
        self.refusal: str | None = None
        self._noted: dict[int, types.CodeType] = {}  # what further calls tell no more of
        self._librarys: set[int] = set()  # of these, what may call any built-in function
        self._imports = 0  # under way: what is imported belongs to no module's code
        self.reads_environment = False
        self.looks_up_names = False  # by names that the code itself does not show
        self.reads_functions = False  # that it does not call
        self.read: set[types.CodeType] = set()  # of functions that it hands to a library

    def watching(self) -> AbstractContextManager[None]:
        return watched(self._note)

    def add(self, other: Codes) -> None:
        """Take over what was seen elsewhere."""
        self.seen.update(other.seen)
        self.reads_environment |= other.reads_environment
        self.looks_up_names |= other.looks_up_names
        self.reads_functions |= other.reads_functions
        self.read |= other.read
        self.refusal = self.refusal or other.refusal

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) in (self._librarys if event == "c_call" else self._noted):
            return
        if code.co_name == _IMPORT and code.co_filename == _IMPORTER:
            self._imports += (event == "call") - (event == "return")
            has_failed = event == "return" and argument is None and not self._imports
            if has_failed and _is_theirs(_caller_of_library(frame)):
                # Whether it can be imported later is a question to files.
                self._refuse(f"import {frame.f_locals.get('name')}, which is not there")
        elif self._imports:
            return
        elif event == "call":
            if is_pythons(code.co_filename):
                if _is_theirs(_caller_of_library(frame)):
                    self.read.update(_codes_among(frame.f_locals.values()))
                name = str(frame.f_globals.get("__name__"))
                if (name, code.co_name) in _CALLBACKS:
                    return
                kind = name.split(".")[0]
                if name == "os" and code.co_name in _READS_OF_ENVIRONMENT:
                    self.reads_environment = True
                    return
                is_logger = kind == "logging" and code.co_name == "getLogger"
                is_finder = name in _FINDERS
                is_others = kind not in _PURE_LIBRARY and _is_theirs(frame.f_back)
                if (is_logger or is_finder or is_others or kind in _IMPURE) and _is_theirs(
                    _caller_of_library(frame)
                ):
                    self._refuse(f"{name}.{code.co_name}")
            elif is_stateful_code(code) and _is_theirs(caller_of(frame)):
                self._refuse(f"{code.co_name} of torch")
            else:
                self._look_at(frame)
        elif event == "c_call" and _is_theirs(frame):
            name = getattr(argument, "__name__", "?")
            owner = getattr(argument, "__module__", None) or _module_of_method(argument, name)
            self.looks_up_names |= name in _LOOK_UPS
            is_pure = owner in _PURE_C or str(owner).split(".")[0] == "torch"
            is_refused = owner == "builtins" and name in _REFUSED_C
            if not is_pure or is_refused or is_stateful(argument):
                self._refuse(f"{owner}.{name}")

    def _look_at(self, frame: types.FrameType) -> None:
        """Note code that is no library's, and that it was looked at."""
        code = frame.f_code
        if not is_stateful_code(code):
            self._noted[id(code)] = code
            if not _is_code_of_theirs(code.co_filename):
                self._librarys.add(id(code))
        if _is_watched(code.co_filename):
            self.seen.setdefault(code, frame.f_globals)
            self.reads_functions |= _reads_functions(code)
            for name in UNSEEN.intersection(code.co_names):
                self._refuse(name)

    def _refuse(self, name: str) -> None:
        if self.refusal is None:
            self.refusal = f"its code calls {name}"


def _reads_functions(code: types.CodeType) -> bool:
    """Whether code may read a function that it does not call and that is not in its closure."""
    if not _OF_FUNCTIONS.isdisjoint(each for each in code.co_consts if type(each) is str):
        return True
    if _OF_FUNCTIONS.isdisjoint(code.co_names):
        return False
    instructions = [*dis.get_instructions(code)]
    return any(
        each.argval in _OF_FUNCTIONS and before.argval not in code.co_freevars
        for before, each in pairwise(instructions)
    )


def _codes_among(values: Iterable[Any]) -> Iterator[types.CodeType]:
    for value in values:
        function = value.__func__ if type(value) is types.MethodType else value
        if type(function) is types.FunctionType:
            yield function.__code__


def _module_of_method(method: Any, name: str) -> str:
    """The module of the class that has a built-in method."""
    own = getattr(method, "__self__", None)
    kinds = own.__mro__ if isinstance(own, type) else type(own).__mro__
    found = ((kind.__module__, vars(kind).get(name)) for kind in kinds)
    is_python = types.FunctionType
    return next((m for m, value in found if value and not isinstance(value, is_python)), "?")


@functools.lru_cache(maxsize=4096)
def is_pythons(filename: str) -> bool:
    is_installed = filename.startswith(_PYTHON) and "-packages" not in filename
    return is_installed or filename.startswith("<frozen")


def is_models(frame: types.FrameType) -> bool:
    """Whether code is the model's, or that of torch's layers, which run in its place."""
    name, caller = frame.f_code.co_filename, frame.f_back
    while name.startswith("<") and not is_pythons(name) and caller is not None:
        # made by whoever called it
        name, caller = caller.f_code.co_filename, caller.f_back
    return _is_models(name)


@functools.lru_cache(maxsize=4096)
def _is_models(filename: str) -> bool:
    return _is_watched(filename) and not (is_pythons(filename) or _OF_SYMBOLS.search(filename))


@functools.lru_cache(maxsize=4096)
def _is_watched(filename: str) -> bool:
    return filename.startswith(_LAYERS) or not filename.startswith((_TORCH, _OURS, _REGION))


def _caller_of_library(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_theirs(frame: types.FrameType | None) -> bool:
    """Whether a frame is of the model's code, and not of a library's."""
    return frame is not None and _is_code_of_theirs(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_code_of_theirs(filename: str) -> bool:
    return not (is_pythons(filename) or filename.startswith((_TORCH, _OURS, _REGION)))
