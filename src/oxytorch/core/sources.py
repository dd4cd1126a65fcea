"""What a derived value was made from, and whether that is still what it was.

Everything that stands in for a part of a model (a fused region, a folded normalization, a fused
decoder layer, a recorded run) keeps the `Sources` that it was made from, asks them before use, and
is not used where they have changed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .modes import functions
from .packed import PackedTensor

SMALL = 64 << 10
"""Bytes up to which a plain tensor is compared by its values, which sees every write. A larger one
is compared by its address and version: `.data` and NumPy write past the version."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(torch.nn.modules.module, f"_global{name}") for name in (*_HOOKS[:2], *_HOOKS[2:])
)
_TABLES = ("_modules", "_parameters", "_buffers")
_version = attrgetter("_version")


class Sources:
    """The modules and tensors that a derived value was made from, as they were then.

    modules: those whose call the derived value skips. Noted are their class, hooks, own `forward`,
    children and all other attributes, by identity; so is the absence of global hooks.
    tensors: further tensors, by identity of their memory and by version; small ones by value.
    owner: the module in whose place the derived value stands; its hooks are called by torch.
    values: whether parameters and buffers of the modules are sources too; else they are read anew
    at each use, and only their number is noted.
    names: global variables that code reads: (name of the Python module, name).
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tensors: Iterable[Tensor] = (),
        *,
        owner: nn.Module | None = None,
        values: bool = True,
        names: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._arguments = ([*modules], [*tensors], owner, values, [*names])
        self._is_lost = False
        self._lock = threading.Lock()
        self._compared: _Compared | None = None

    def are_current(self) -> bool:
        """Whether nothing was replaced, added, removed or written to."""
        compared = self._compared
        if compared is None:
            compared = self._made()
        return compared.are_current()

    def note(self) -> None:
        """Take what is there now as what the derived value was made from."""
        self._compared, self._is_lost = None, False
        self._made()

    def _made(self) -> _Compared:
        with self._lock:
            if self._compared is None:
                self._compared = _NOTHING if self._is_lost else _compared(*self._arguments)
            return self._compared

    def __getstate__(self) -> dict[str, Any]:
        # A copy notes what its own modules are like, once they are there.
        return {"_arguments": self._arguments, "_is_lost": not self.are_current()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._compared = None


def _compared(
    modules: list[nn.Module],
    tensors: list[Tensor],
    owner: nn.Module | None,
    values: bool,
    names: list[tuple[str, str]],
) -> _Compared:
    found = _Compared()
    for module_name, name in names:
        table = sys.modules[module_name].__dict__ if module_name in sys.modules else {}
        found.add_entry(table, name, table.get(name))
    for hooks in _GLOBAL_HOOKS:
        found.add_table(hooks)
    for module in modules:
        found.add_type(module)
        for name in _HOOKS:
            found.add_table(module.__dict__[name])
        found.add_entry(module.__dict__, "forward", module.__dict__.get("forward"))
    for module in (*modules, *([] if owner is None else [owner])):
        for name, value in module.__dict__.items():
            if name not in (*_HOOKS, *_TABLES, "forward") and not name.startswith("_oxytorch"):
                found.add_entry(module.__dict__, name, value)
        found.add_table(module._modules)
        for table in (module._parameters, module._buffers):
            if values:
                found.add_table(table)
            else:
                found.add_size(table)
    if values:
        for module in (*modules, *([] if owner is None else [owner])):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    found.add_tensor(tensor)
    for tensor in tensors:
        found.add_tensor(tensor)
    found.close()
    return found


class _Compared:
    """The places to look at, and what was found there; compared by core/sources.cpp."""

    def __init__(self) -> None:
        self._entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._types: list[tuple[Any, type]] = []
        self._versioned: list[Tensor] = []
        self._small: list[Tensor] = []
        self._native: Any = None

    def add_entry(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._entries.append((table, key, value))

    def add_size(self, table: dict[Any, Any]) -> None:
        self._sizes.append((table, len(table)))

    def add_table(self, table: dict[Any, Any]) -> None:
        self.add_size(table)
        self._entries += [(table, key, value) for key, value in table.items()]

    def add_type(self, module: nn.Module) -> None:
        self._types.append((module, type(module)))

    def add_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, PackedTensor):
            self._versioned.append(tensor.cell.clock)
        elif _is_small(tensor):
            self._small.append(tensor)
        else:
            self._versioned.append(tensor)

    def close(self) -> None:
        """Note how the tensors are now."""
        library = functions()
        watchable = not any(t.is_inference() or t.device.type != "cpu" for t in self._versioned)
        if library is not None and watchable and library.oxytorch_can_compare_sources():
            self._native = _Native(library, self)
            return
        self._versions = [(t.data_ptr(), _version(t)) for t in self._versioned if watchable]
        self._is_watchable = watchable
        self._copies = [t.detach().clone() for t in self._small]

    def are_current(self) -> bool:
        if self._native is not None:
            current: bool = self._native.are_current()
            return current
        return (
            self._is_watchable
            and all(len(table) == count for table, count in self._sizes)
            and all(table.get(key) is value for table, key, value in self._entries)
            and all(type(module) is kind for module, kind in self._types)
            and [(t.data_ptr(), _version(t)) for t in self._versioned] == self._versions
            and all(map(_same_bits, self._small, self._copies))
        )


class _Native:
    """The comparison in C++. Objects are handed over by address; `_Compared` keeps them."""

    def __init__(self, library: ctypes.PyDLL, places: _Compared) -> None:
        self._address = torch.ops.oxytorch.sources(places._versioned, places._small)
        weakref.finalize(self, library.oxytorch_forget_sources, ctypes.c_void_p(self._address))
        address = ctypes.c_void_p(self._address)
        entries, sizes, types = places._entries, places._sizes, places._types
        library.oxytorch_add_entries(
            address,
            _addresses([e[0] for e in entries]),
            _addresses([e[1] for e in entries]),
            # An entry that is None is told from one that is missing: `forward` alone may be.
            (ctypes.c_void_p * len(entries))(
                *(None if e[2] is None and e[1] not in e[0] else id(e[2]) for e in entries)
            ),
            ctypes.c_int64(len(entries)),
        )
        library.oxytorch_add_sizes(
            address,
            _addresses([s[0] for s in sizes]),
            (ctypes.c_int64 * len(sizes))(*(s[1] for s in sizes)),
            ctypes.c_int64(len(sizes)),
        )
        library.oxytorch_add_types(
            address,
            _addresses([t[0] for t in types]),
            _addresses([t[1] for t in types]),
            ctypes.c_int64(len(types)),
        )
        self._ask = library.oxytorch_sources_are_current
        self._argument = address

    def are_current(self) -> bool:
        return bool(self._ask(self._argument))


def _addresses(objects: list[Any]) -> Any:
    return (ctypes.c_void_p * len(objects))(*map(id, objects))


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_contiguous()
        and tensor.nbytes <= SMALL
    )


def _same_bits(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape or now.dtype != then.dtype:
        return False
    return torch.equal(now.detach().view(torch.uint8), then.view(torch.uint8))


class _Nothing(_Compared):
    """What a copy of a stale value is compared with."""

    def are_current(self) -> bool:
        return False


_NOTHING = _Nothing()
