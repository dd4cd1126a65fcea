"""What a derived value was made from, and whether that is still what it was.

Everything that stands in for a part of a model (a fused region, a folded normalization, a fused
decoder layer, a recorded run) keeps the `Sources` that it was made from, asks them before use, and
is not used where they have changed.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from .._library import functions_in_known_torch
from .fused_steps import count_fused_steps
from .layer_functions import functions_of
from .packed import PackedTensor
from .tensor_forms import form, has_form, is_small, is_watchable, same_bits
from .words import bare_place, has_no_attributes, offsets, set_offsets

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS)
_TABLES = ("_modules", "_parameters", "_buffers")
_UNREAD = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}
"""Attributes that a forward does not read, or that are compared in another way: those that torch
gives every module (what belongs to hooks matters where there is a hook)."""
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device)
_version = attrgetter("_version")


class Sources:
    """The modules and tensors that a derived value was made from, as they were then.

    modules: those whose call the derived value skips. Noted are their class and its forward, hooks,
        own `forward`, children and all other attributes, by identity, and the keywords of those
        that are `functools.partial`; so are the hooks for all modules.
    tensors: further tensors, by identity of their memory and by version; small ones by value.
    owner: the module in whose place the derived value stands; its hooks are called by torch.
    holders: modules that are not called, whose children, settings and tensors code may read: lists
        of modules above all.
    values: whether parameters and buffers of the modules are sources too; else they are read again
        at each use, and only noted is which there are.
    names: global variables that code reads: (name of the Python module, name).
    methods: what code finds in a module's class: (module, name).
    settings: what it reads in another object, such as a configuration: (object, name).

    A copy (deepcopy, pickle) is compared with what it is a copy of; one with values or tensors is
    not current until `note` is called.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tensors: Iterable[Tensor] = (),
        *,
        owner: nn.Module | None = None,
        holders: Iterable[nn.Module] = (),
        values: bool = True,
        names: Iterable[tuple[str, str]] = (),
        methods: Iterable[tuple[nn.Module, str]] = (),
        settings: Iterable[tuple[Any, str]] = (),
    ) -> None:
        self._modules = [*modules]
        self._tensors = [*tensors]
        self._owners = [*([] if owner is None else [owner]), *holders]
        self._values = values
        self._names = [*names]
        self._methods = [*methods]
        self._settings = [*settings]
        self._lock = threading.Lock()
        self.note()

    def note(self) -> None:
        """Take what is there now as what the derived value was made from."""
        modules, owners = self._modules, self._owners
        tables: list[tuple[Any, str]] = [(m, name) for m in modules for name in _HOOKS]
        entries: list[_Entry] = [
            (m, None, "forward", m.__dict__.get("forward", MISSING)) for m in modules
        ]
        for module in (*modules, *owners):
            tables.append((module, "_modules"))
            for name, value in module.__dict__.items():
                is_read = name not in _UNREAD and name != "forward"
                if is_read and not name.startswith("_oxytorch"):
                    entries.append((module, None, name, value))
        if self._values:
            tables += [(m, name) for m in (*modules, *owners) for name in _TABLES[1:]]
        for module, table in tables:
            items = module.__dict__[table].items()
            entries += [(module, table, key, value) for key, value in items]
        # Code may ask what a module below it is, and whether it is being trained.
        children = [c for m in (*modules, *owners) for c in m.children()]
        entries += [(child, None, "training", child.training) for child in children]
        entries += [(m, None, name, m.__dict__.get(name, MISSING)) for m, name in self._methods]
        entries += [(o, None, name, o.__dict__.get(name, MISSING)) for o, name in self._settings]
        self._entries = entries
        self._present = self._note_parameters(tables)
        self._note_classes(children)
        self._parts = self._note_partials(tables)
        self._sizes = [(m, t, len(_table(m, t))) for m, t in tables]
        self._dictionaries = [(m, t) for m, t in tables if isinstance(m, nn.Module)]
        self._hook_counts = [*map(len, GLOBAL_HOOKS)]
        self._is_lost = False
        self._compared: Places | None = None
        self._looked_at: list[Any] = []
        self._made()

    def _note_parameters(self, tables: list[tuple[Any, str]]) -> list[tuple[nn.Module, str, str]]:
        """Where parameters and buffers are that are read again at each use; notes which are not."""
        present: list[tuple[nn.Module, str, str]] = []
        if not self._values:
            both = (*self._modules, *self._owners)
            tables += (read := [(m, name) for m in both for name in _TABLES[1:]])
            for module, table in read:
                for key, value in module.__dict__[table].items():
                    if value is None:
                        self._entries.append((module, table, key, None))
                    else:
                        present.append((module, table, key))
        return present

    def _note_classes(self, children: list[nn.Module]) -> None:
        modules, owners = self._modules, self._owners
        self._types = [(m, type(m)) for m in (*modules, *owners, *children)]
        kinds = dict.fromkeys(type(m) for m in (*modules, *owners))
        found = {(kind, name): None for kind in kinds for name in ("forward", "__call__")}
        found |= {(type(m), name): None for m, name in self._methods}
        self._found = [(kind, name, getattr(kind, name, MISSING)) for kind, name in found]
        names = dict.fromkeys((*self._names, *(name for k in kinds for name in functions_of(k))))
        self._globals = [(owner, name, _global(owner, name)) for owner, name in names]

    def _note_partials(self, tables: list[tuple[Any, str]]) -> list[tuple[partial[Any], str, Any]]:
        entries = self._entries
        parts: list[tuple[partial[Any], str, Any]] = []
        for *_, value in (*entries, *self._found):
            for own in _partials(value):
                tables.append((own, _KEYWORDS))
                entries += [(own, _KEYWORDS, key, item) for key, item in own.keywords.items()]
                parts += _parts_of(own)
        return parts

    def are_current(self) -> bool:
        """Whether nothing was replaced, added, removed or written to."""
        compared = self._compared
        if compared is None:
            compared = self._made()
        return compared.are_current() or self._were_replaced()

    def _were_replaced(self) -> bool:
        """Whether all that was changed is that dictionaries of modules are other objects with the
        same content: then these are looked at from now on."""
        with self._lock:
            compared = self._compared
            if compared is None or isinstance(compared, _Nothing) or self._values or self._tensors:
                return False  # what is closed again would take tensors as they are now
            now = [m.__dict__.get(name) for m, name in self._dictionaries]
            pairs = zip(self._looked_at, now, strict=True)
            others = {id(then): table for then, table in pairs if then is not table}
            if not others or not all(isinstance(table, dict) for table in others.values()):
                return False
            found = compared.with_dictionaries(others)
            if not (compared.are_functions_same() and found.are_current()):
                return False
            self._compared, self._looked_at = found, now
            return True

    def _made(self) -> Places:
        with self._lock:
            if self._compared is None:
                is_lost = self._is_lost or not self._is_unchanged()
                self._compared = _Nothing() if is_lost else self._compare()
            return self._compared

    def _is_unchanged(self) -> bool:
        """Whether a copy's structure is still that of what it is a copy of."""
        return (
            all(len(_table(m, t)) == count for m, t, count in self._sizes)
            and all(_same(_table(m, t).get(k, MISSING), v) for m, t, k, v in self._entries)
            and all(type(m) is kind for m, kind in self._types)
            and all(_same(getattr(own, name), part) for own, name, part in self._parts)
            and all(getattr(k, name, MISSING) is value for k, name, value in self._found)
        )

    def _compare(self) -> Places:
        found = Places()
        for hooks, count in zip(GLOBAL_HOOKS, self._hook_counts, strict=True):
            found.sizes.append((hooks, count))
        for module, table, key, value in self._entries:
            places = _table(module, table)
            # A constant of a copy is equal, and need not be the same object.
            now = places.get(key, MISSING) if value is not MISSING else MISSING
            found.entries.append((places, key, now))
        found.present = [(m.__dict__[table], key) for m, table, key in self._present]
        for owner, name, value in self._globals:
            if owner in sys.modules:
                found.entries.append((sys.modules[owner].__dict__, name, value))
                for own in _partials(value):
                    found.add_dictionary(own.keywords)
                    found.attributes += _parts_of(own)
        self._looked_at = [m.__dict__[name] for m, name in self._dictionaries]
        for (module, name), table in zip(self._dictionaries, self._looked_at, strict=True):
            found.entries.append((module.__dict__, name, table))
        for module, name, count in self._sizes:
            found.sizes.append((_table(module, name), count))
            found.add_order(_table(module, name))
        found.types = [*self._types]
        found.attributes += [own for own in self._found if own[2] is not MISSING]
        found.attributes += [(own, name, getattr(own, name)) for own, name, _ in self._parts]
        functions = dict.fromkeys(v for *_, v in (*self._found, *self._globals) if _is_users(v))
        for function in functions:
            found.add_function(function)
        tensors: list[Tensor | None] = [*self._tensors]
        if self._values:
            owned = (*self._modules, *self._owners)
            tensors += [t for m in owned for t in (*m._parameters.values(), *m._buffers.values())]
        for tensor in tensors:
            if tensor is not None:
                found.add_tensor(tensor)
        found.close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_compared")}
        state["_is_lost"] = self._values or bool(self._tensors) or not self.are_current()
        state["_globals"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._globals = [(owner, name, _global(owner, name)) for owner, name in self._names]
        self._lock = threading.Lock()
        self._compared = None


_Entry = tuple[Any, str | None, Any, Any]


class _Missing:
    """Stands for an entry that is not there; one object, also in copies."""

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


_KEYWORDS = "keywords"


def _table(module: Any, name: str | None) -> dict[Any, Any]:
    own: dict[Any, Any] = module.__dict__
    if isinstance(module, partial) and name == _KEYWORDS:
        own = module.keywords
    elif name is not None:
        own = own[name]
    return own


def _partials(value: Any) -> Iterator[partial[Any]]:
    """A partial, and those inside it."""
    while isinstance(value, partial):
        yield value
        value = value.func


def _parts_of(own: partial[Any]) -> list[tuple[partial[Any], str, Any]]:
    """What `__setstate__` replaces."""
    return [(own, name, getattr(own, name)) for name in ("func", "args", _KEYWORDS)]


def _global(owner: str, name: str) -> Any:
    return sys.modules[owner].__dict__.get(name, MISSING) if owner in sys.modules else MISSING


_CODE = ("__code__", "__defaults__", "__kwdefaults__")
"""What may be assigned to a function in place, as IPython's autoreload does."""


def _is_users(value: Any) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and not (value.__module__ or "").startswith(("torch.", "oxytorch."))


def _same(now: Any, then: Any) -> bool:
    return now is then or (isinstance(then, _CONSTANTS) and type(now) is type(then) and now == then)


class Places:
    """The places to look at, and what was found there; compared by core/sources.cpp.

    entries: (dictionary, key, value).
    present: (dictionary, key) of what is not None.
    sizes: (dictionary, how many).
    orders: (dictionary, its keys).
    types: (object, its type).
    attributes: (object, name, value).
    bare: objects that have no attributes.
    functions: (it, its code and defaults).
    lists, sets: (it, what it holds).
    versioned, small: tensors whose values are compared, by their versions and as such.
    formed: those whose sizes, strides and dtype are.
    clocks: written to when packed tensors are.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self.present: list[tuple[dict[Any, Any], Any]] = []
        self.sizes: list[tuple[dict[Any, Any], int]] = []
        self.types: list[tuple[Any, type]] = []
        self.attributes: list[tuple[Any, str, Any]] = []
        self.bare: list[Any] = []
        self.functions: list[tuple[types.FunctionType, list[Any]]] = []
        self.lists: list[tuple[list[Any], list[Any]]] = []
        self.sets: list[tuple[set[Any], list[Any]]] = []
        self.orders: list[tuple[dict[Any, Any], list[Any]]] = []
        self.versioned: list[Tensor] = []
        self.small: list[Tensor] = []
        self.formed: list[Tensor] = []
        self.clocks: list[Tensor] = []
        self._compare: Callable[[], bool] | None = None

    def __len__(self) -> int:
        parts: tuple[Sized, ...] = (
            self.entries, self.present, self.sizes, self.types, self.attributes, self.bare,
            self.functions, self.lists, self.sets, self.orders, self.versioned, self.small,
            self.formed, self.clocks,
        )  # fmt: skip
        return sum(map(len, parts))

    def add_order(self, table: dict[Any, Any]) -> None:
        if len(table) > 1:
            self.orders.append((table, [*table]))

    def add_dictionary(self, table: dict[Any, Any]) -> None:
        self.sizes.append((table, len(table)))
        self.add_order(table)
        self.entries += [(table, key, value) for key, value in dict.items(table)]

    def add_function(self, function: types.FunctionType) -> None:
        self.functions.append((function, [getattr(function, name) for name in _CODE]))
        if function.__kwdefaults__:
            self.add_dictionary(function.__kwdefaults__)

    def add_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, PackedTensor):
            self.clocks.append(tensor.cell.clock)
            self.formed.append(tensor)  # another one may be swapped into the object
            return
        self.formed.append(tensor)
        if tensor.layout == torch.strided and is_small(tensor):
            self.small.append(tensor)
        else:
            self.versioned.append(tensor)

    def with_dictionaries(self, others: Mapping[int, Any]) -> Places:
        """The same places, closed, with other dictionaries in place of those with these ids. There
        must be no tensors among them."""

        def other(value: Any) -> Any:
            return others.get(id(value), value)

        found = copy.copy(self)
        found.entries = [(other(table), key, other(value)) for table, key, value in self.entries]
        found.present = [(other(table), key) for table, key in self.present]
        found.sizes = [(other(table), count) for table, count in self.sizes]
        found.orders = []
        for table, keys in self.orders:
            table = other(table)
            names = [*table]  # names of the same letters, which need not be the same objects
            found.orders.append((table, names if names == keys else keys))
        found._compare = None
        found.close()
        return found

    def without_values(self) -> Places:
        """The same places, closed, at which tensors may be written to."""
        found = Places()
        for name, places in vars(self).items():
            if isinstance(places, list) and name not in ("versioned", "small"):
                setattr(found, name, places)
        found.close()
        return found

    def close(self) -> None:
        """Note how the tensors are now."""
        if self.versioned:
            count_fused_steps()
        library = functions_in_known_torch()
        counted = [*self.versioned, *self.clocks]
        watchable = all(map(is_watchable, counted)) and all(map(has_form, self.formed))
        if library is not None and watchable and library.oxytorch_can_compare_sources():
            self._compare = _in_library(library, self, counted)
            return
        self._counted = counted
        self._is_watchable = watchable
        self._versions = [(t.data_ptr(), _version(t)) for t in counted if watchable]
        self._copies = [t.detach().clone() for t in self.small]
        self._forms = [(t._cdata, form(t)) for t in self.formed if watchable]

    def are_functions_same(self) -> bool:
        """Whether functions have the code and defaults that they had when they were added."""
        return all(
            _same_items([getattr(own, name) for name in _CODE], values)
            for own, values in self.functions
        )

    def are_current(self) -> bool:
        if self._compare is not None:
            return self._compare()
        return (
            self._is_watchable
            and all(len(table) == count for table, count in self.sizes)
            and all(table.get(key, MISSING) is value for table, key, value in self.entries)
            and all(table.get(key) is not None for table, key in self.present)
            and all(type(module) is kind for module, kind in self.types)
            and all(getattr(own, name, None) is value for own, name, value in self.attributes)
            and all(has_no_attributes(own) or not vars(own) for own in self.bare)
            and self.are_functions_same()
            and all(_same_items(own, items) for own, items in self.lists)
            and all(_same_items([*own], items) for own, items in self.sets)
            and all(_same_items([*own], keys) for own, keys in self.orders)
            and [(t._cdata, form(t)) for t in self.formed] == self._forms
            and [(t.data_ptr(), _version(t)) for t in self._counted] == self._versions
            and all(map(same_bits, self.small, self._copies))
        )


def _in_library(library: ctypes.PyDLL, places: Places, counted: list[Tensor]) -> Callable[[], bool]:
    """The comparison in C++. Objects are handed over by address; `Places` keeps them."""
    set_offsets(library)
    tensors, place = (counted, places.small, places.formed), offsets().tensor
    owned: Iterable[list[Tensor]] = ([], [], []) if place else tensors
    address = ctypes.c_void_p(torch.ops.oxytorch.sources(*owned))
    compare: Callable[[], bool] = library.oxytorch_sources_function(address)

    def add(kind: str, rows: Sequence[Any], *columns: Any) -> None:
        to = getattr(library, f"oxytorch_add_{kind}")
        to(address, *columns, ctypes.c_int64(len(rows)))

    if place:
        for number, those in enumerate(tensors):
            add("tensors", those, _addresses(those), number, ctypes.c_int64(place))
    entries, sizes, types = places.entries, places.sizes, places.types
    values = (ctypes.c_void_p * len(entries))(
        *(None if value is MISSING else id(value) for *_, value in entries)
    )
    add("entries", entries, _column(entries, 0), _column(entries, 1), values)
    present, functions = places.present, places.functions
    add("present", present, _column(present, 0), _column(present, 1))
    counts = (ctypes.c_int64 * len(sizes))(*(count for _, count in sizes))
    add("sizes", sizes, _column(sizes, 0), counts)
    add("types", types, _column(types, 0), _column(types, 1))
    for of_classes in (False, True):
        rows = [own for own in places.attributes if isinstance(own[0], type) is of_classes]
        add("attributes", rows, *(_column(rows, i) for i in range(3)), of_classes)
    places_of_bare = (ctypes.c_int64 * len(places.bare))(*map(bare_place, places.bare))
    add("bare", places.bare, _addresses(places.bare), places_of_bare)
    add("functions", functions, _column(functions, 0))
    for kind in ("lists", "sets", "orders"):
        for container, items in getattr(places, kind):
            add(kind, items, ctypes.c_void_p(id(container)), _addresses(items))
    library.oxytorch_close_sources(address)
    return compare


def _column(rows: Sequence[tuple[Any, ...]], number: int) -> Any:
    return _addresses([row[number] for row in rows])


def _addresses(objects: list[Any]) -> Any:
    return (ctypes.c_void_p * len(objects))(*map(id, objects))


def _same_items(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


class _Nothing(Places):
    """What a stale value is compared with."""

    def are_current(self) -> bool:
        return False
