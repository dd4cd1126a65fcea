"""Where CPython and torch keep what tells that an object has changed.

Guards of a model look at thousands of objects in each call. Most of what can change of an object is
told by one word of its memory (`core/words.h`). No public interface says where it lies, so it is
looked for: in objects made here, whose words are known, and which are changed in all ways that
there are. What is not found is 0, and compared by functions of Python and torch.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

_SIZE = ctypes.sizeof(ctypes.c_void_p)
_ROUNDS = 64
"""Times that code makes each change: Python puts quicker instructions into code that runs often."""


class Offsets(NamedTuple):
    """In bytes, in the order of `Offsets` in core/python.h."""

    kind: int = 0
    tag: int = 0
    values: int = 0
    order: int = 0
    table: int = 0
    name: int = 0
    code: int = 0
    defaults: int = 0
    keyword_defaults: int = 0
    content: int = 0
    function: int = 0
    dtype: int = 0
    storage: int = 0
    counter: int = 0
    keys: int = 0
    tensor: int = 0


@functools.cache
def offsets() -> Offsets:
    """What this Python and this torch have."""
    is_known = sys.implementation.name == "cpython" and _SIZE == 8
    if not is_known or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Offsets()
    kind = _place_of(dict, {}, 6)
    if kind != _SIZE:
        return Offsets()
    tag, values = _of_dictionaries()
    of_methods = _place_of(_of_cells, staticmethod(_of_cells), staticmethod.__basicsize__ // _SIZE)
    of_others = _of_cells(), of_methods, _of_tensors(), *_in_tensors(), _of_keys(), _of_handles()
    return Offsets(kind, tag, values, *_of_classes(), *_of_functions(), *of_others)


@functools.cache
def set_offsets(library: ctypes.PyDLL) -> None:
    """Tell the library of them, once."""
    found = offsets()
    library.oxytorch_set_offsets((ctypes.c_int64 * len(found))(*found))


def has_no_attributes(value: Any) -> bool:
    """Whether an object can have attributes of its own, and was never asked for them, so that there
    is no dictionary of them. False where that is not known."""
    place = bare_place(value)
    return place > 0 and _words(id(value) + place, 1) == [0]


def bare_place(value: Any) -> int:
    """Where an object has the address of the dictionary with its attributes, in bytes; 0 where that
    is not known."""
    return type(value).__dictoffset__ if type(value) in _with_places() else 0


@functools.cache
def _with_places() -> frozenset[type]:
    """Of these classes, which keep the dictionary where they say, as is tried out here."""
    if not offsets().kind:
        return frozenset()
    made: tuple[Any, ...] = (types.FunctionType(_words.__code__, {}), OrderedDict())
    return frozenset(type(value) for value in made if _keeps_dictionary(value))


def _keeps_dictionary(value: Any) -> bool:
    place = type(value).__dictoffset__
    if not 0 < place <= type(value).__basicsize__ - _SIZE:
        return False
    before, table = _words(id(value) + place, 1), vars(value)
    return before == [0] and _words(id(value) + place, 1) == [id(table)]


def _words(address: int, count: int) -> list[int]:
    return [*(ctypes.c_size_t * count).from_address(address)]


def _place_of(value: Any, owner: Any, count: int) -> int:
    """Where the only one of an object's first words lies that points to `value`; 0 if none does."""
    found = [i for i, word in enumerate(_words(id(owner), count)) if word == id(value)]
    return found[0] * _SIZE if len(found) == 1 else 0


_TAG, _VALUES = 3 * _SIZE, 5 * _SIZE
"""Behind an object's first two words and a dictionary's size; behind its keys."""


class _Object:
    def __init__(self) -> None:
        self.first, self.second = object(), object()


def _of_dictionaries() -> tuple[int, int]:
    """Where the number is that each change replaces, and what is not null where changes of an
    object's attributes do not."""
    if not _is_told(_changes_of_dictionaries()):
        return 0, 0
    return _TAG, 0 if _is_told(_changes_of_attributes()) else _VALUES


_Change = tuple[dict[Any, Any], Callable[[], object]]


def _is_told(changes: Iterator[_Change]) -> bool:
    """Whether each change gives a dictionary a number greater than any had before."""
    greatest = 0
    for table, change in changes:
        tag = ctypes.c_size_t.from_address(id(table) + _TAG)
        greatest = max(greatest, tag.value)
        change()
        if tag.value <= greatest:
            return False
    return True


def _changes_of_dictionaries() -> Iterator[_Change]:
    def assign(table: dict[Any, Any], key: Any) -> None:
        table[key] = object()

    def delete(table: dict[Any, Any], key: Any) -> None:
        del table[key]

    def unite(table: dict[Any, Any]) -> None:
        table |= {"a": object()}

    made = type("Made", (), {"first": None})
    for table in ({}, OrderedDict[Any, Any](), gc.get_referents(vars(made))[0], {1: 2, "a": 3}):
        for _ in range(_ROUNDS if type(table) is dict else 1):
            for key in ("a", 2):
                yield table, functools.partial(assign, table, key)
                yield table, functools.partial(assign, table, key)
                yield table, functools.partial(delete, table, key)
        yield table, functools.partial(table.setdefault, "a", 1)
        yield table, functools.partial(table.update, a=object())
        yield table, functools.partial(table.update, {"a": object(), "b": 1})
        yield table, functools.partial(table.pop, "a")
        yield table, functools.partial(unite, table)
        yield table, table.popitem
    for kind in (dict, OrderedDict):
        table = kind(a=1, b=2)
        yield table, table.clear
    table = vars(types.ModuleType("made"))
    exec("def change():\n  global a\n  a = object()", table)
    for _ in range(_ROUNDS):
        yield table, table["change"]
    yield gc.get_referents(vars(made))[0], functools.partial(setattr, made, "first", 1)


def _changes_of_attributes() -> Iterator[_Change]:
    def assign(owner: _Object) -> None:
        owner.first = object()

    def add(owner: Any) -> None:
        owner.third = 1

    def delete(owner: Any) -> None:
        del owner.third

    shared = _Object()
    table = vars(shared)
    for _ in range(_ROUNDS):
        yield table, functools.partial(assign, shared)
        yield table, functools.partial(setattr, shared, "second", object())
        yield table, functools.partial(add, shared)
        yield table, functools.partial(delete, shared)
        yield table, functools.partial(object.__setattr__, shared, "first", object())
        own = _Object()
        assign(own)
        yield vars(own), functools.partial(assign, own)


def _of_classes() -> tuple[int, int, int]:
    made = type("Made", (), {"__qualname__": "".join(["other ", "name"])})
    made.__name__ = name = "".join(["given ", "name"])
    kind: type = type(made)
    count = kind.__basicsize__ // _SIZE
    order, table = made.__mro__, gc.get_referents(vars(made))[0]
    found = _place_of(order, made, count), _place_of(table, made, count)
    return (*found, _place_of(name, made, count)) if type(table) is dict else (0, 0, 0)


def _of_functions() -> tuple[int, int, int]:
    def made() -> None: ...

    parts = (made.__code__, (1,), {"a": 1})
    _, made.__defaults__, made.__kwdefaults__ = parts
    count = type(made).__basicsize__ // _SIZE
    code, defaults, keywords = (_place_of(part, made, count) for part in parts)
    return code, defaults, keywords


def _of_cells() -> int:
    content = object()
    return _place_of(content, types.CellType(content), types.CellType.__basicsize__ // _SIZE)


_OF_TENSORS = 192
"""Bytes of a tensor's object that are looked at; it has some more."""
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


def _of_tensors() -> int:
    """Where the word with the dtype is in a tensor's object: the only number of two bytes that
    tensors of each dtype have another one of, and those of the same dtype the same."""
    made = [torch.empty((2, 3), dtype=dtype, device="cpu") for dtype in _DTYPES for _ in range(2)]
    numbers = ctypes.c_uint16 * (_OF_TENSORS // 2)
    rows = [[*numbers.from_address(tensor._cdata)] for tensor in made]
    found = [
        number
        for number, column in enumerate(zip(*rows, strict=True))
        if column[::2] == column[1::2] and len({*column}) == len(_DTYPES)
    ]
    return found[0] * 2 // _SIZE * _SIZE if len(found) == 1 else 0


def _in_tensors() -> tuple[int, int]:
    """Where the addresses of what a tensor shares with its views are in a tensor's object: its
    storage and the counter of writes. It is what they have in common and a copy has not. They are
    read ahead only."""
    made = torch.zeros(3, device="cpu")
    count = _OF_TENSORS // _SIZE
    kinds = (_words(tensor._cdata, count) for tensor in (made, made.detach(), made.clone()))
    found = [
        number * _SIZE
        for number, (own, of_view, of_copy) in enumerate(zip(*kinds, strict=True))
        if own == of_view != of_copy and own % _SIZE == 0 and own > 1 << 16
    ]
    return (found[0], found[1]) if len(found) == 2 else (0, 0)


def _of_keys() -> int:
    """Where the word with the dispatch keys is in a tensor's object."""
    plain = torch.zeros(3, device="cpu")
    made = (plain, torch._neg_view(plain), torch.zeros(3, device="meta"))
    return _common((t._cdata, _OF_TENSORS, keys_of(t)) for t in made)


def keys_of(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys, as one number."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def _of_handles() -> int:
    """Where objects of Python, of whatever class, have the address of torch's."""
    made = (
        torch.zeros(3, device="cpu"),
        torch.nn.Parameter(torch.zeros(3, device="cpu")),
        torch.nn.UninitializedBuffer(),
    )
    return _common((id(t), torch.Tensor.__basicsize__, t._cdata) for t in made)


def _common(owners: Iterable[tuple[int, int, int]]) -> int:
    """Where the only word lies that is the given one in each object, of an address and a size in
    bytes; 0 if there is none."""
    found = [
        {i * _SIZE for i, own in enumerate(_words(address, size // _SIZE)) if own == word}
        for address, size, word in owners
    ]
    places = set.intersection(*found)
    return places.pop() if len(places) == 1 else 0
