"""Instruction-set levels: which are built, which this processor supports, which one runs.

A level is one entry of the list in `cmake/isa.cmake`; kernels are compiled once per level. Wheels
have all levels, an editable install `generic` and the best one of the machine that built it. The
active level belongs to the process, not to a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import _library
from .config import current

# What PyTorch calls the levels in ATEN_CPU_CAPABILITY, where the name differs from ours.
_TORCH_NAMES = {"default": "generic"}


@dataclass(frozen=True)
class Level:
    """An entry of the list of levels.

    supported: it is built, and this processor and its operating system can run it.
    implies: names of the levels whose instructions it also uses.
    built: the library has its kernels.
    capabilities: what kernels ask of a level and this one has, by the names of `cmake/isa.cmake`.
    """

    name: str
    supported: bool
    implies: tuple[str, ...]
    built: bool
    capabilities: tuple[str, ...]


@functools.cache
def levels() -> tuple[Level, ...]:
    """Every level of the list, from the least to the most capable; empty without a library."""
    if not _library.loaded:
        return ()
    library = _library.functions()
    count = library.oxytorch_level_count()
    names = [str(library.oxytorch_level_name(index), "ascii") for index in range(count)]
    supported = library.oxytorch_supported_levels()
    built = library.oxytorch_built_levels()
    return tuple(
        Level(
            name=name,
            supported=bool(supported >> index & 1),
            implies=tuple(
                other
                for bit, other in enumerate(names)
                if library.oxytorch_level_implies(index) >> bit & 1
            ),
            built=bool(built >> index & 1),
            capabilities=tuple(
                capability
                for bit, capability in enumerate(_capabilities())
                if library.oxytorch_level_capabilities(index) >> bit & 1
            ),
        )
        for index, name in enumerate(names)
    )


def active() -> str:
    """Name of the level whose kernels run; "reference" where plain PyTorch runs instead."""
    if not _library.loaded:
        return "reference"
    return levels()[int(_library.functions().oxytorch_active_level())].name


def has(capability: str) -> bool:
    """Whether the active level has a capability, such as "tiles"; False without a library.

    Raises ValueError for a name that is not in the list of `cmake/isa.cmake`.
    """
    if not _library.loaded:
        return False
    if capability not in _capabilities():
        known = ", ".join(_capabilities())
        raise ValueError(f"isa.has: expected a capability from {known}, got {capability!r}")
    return capability in levels()[int(_library.functions().oxytorch_active_level())].capabilities


def why() -> str:
    """A sentence on why the active level is the active one."""
    if not _library.loaded:
        return _library.why_missing
    name = active()
    if current.isa:
        return f"OXYTORCH_ISA={current.isa}"
    if current.cpu_capability and name == _bounded(current.cpu_capability):
        return f"the best level within ATEN_CPU_CAPABILITY={current.cpu_capability}"
    return "the best level that this processor supports"


@contextmanager
def use(name: str) -> Iterator[None]:
    """Runs the kernels of level `name` inside a `with` block, in every thread of the process.

    Raises ValueError if the level is unknown, not built, or this processor does not support it.
    """
    before = active()
    _activate(name, "oxytorch.isa.use")
    try:
        yield
    finally:
        _activate(before, "oxytorch.isa.use")


def last_called() -> str | None:
    """Name of the level whose code ran last in this process, None before the first kernel."""
    index = int(_library.functions().oxytorch_last_level())
    return None if index < 0 else levels()[index].name


def forget_last_called() -> None:
    """Makes `last_called` return None until the next kernel runs."""
    _library.functions().oxytorch_forget_last_level()


@functools.cache
def _capabilities() -> tuple[str, ...]:
    library = _library.functions()
    count = library.oxytorch_capability_count()
    return tuple(str(library.oxytorch_capability_name(index), "ascii") for index in range(count))


def _choices() -> str:
    return ", ".join(level.name for level in levels() if level.supported)


def _activate(name: str, source: str) -> None:
    index = next((i for i, level in enumerate(levels()) if level.name == name), None)
    if index is None:
        raise ValueError(f"{source}: unknown level {name!r}; this processor supports: {_choices()}")
    if not levels()[index].built:
        raise ValueError(
            f"{source}: level {name!r} is not built into this library; it has: {_choices()}; "
            "`make test` builds every level, as wheels have them"
        )
    if _library.functions().oxytorch_activate_level(index) != 0:
        raise ValueError(
            f"{source}: this processor does not support level {name!r}; it supports: {_choices()}"
        )


def _bounded(bound: str) -> str:
    """The best supported level that uses no instruction beyond level `bound`."""
    wanted = _TORCH_NAMES.get(bound.lower(), bound.lower())
    top = next((level for level in levels() if level.name == wanted), None)
    if top is None:
        known = ", ".join(["default", *(level.name for level in levels())])
        raise ValueError(f"ATEN_CPU_CAPABILITY: unknown value {bound!r}; choices: {known}")
    allowed = [
        level.name
        for level in levels()
        if level.supported and (level is top or level.name in top.implies)
    ]
    return allowed[-1] if allowed else levels()[0].name


def apply_environment() -> None:
    """Activates the level that the environment asks for; called once by `import oxytorch`."""
    if not _library.loaded:
        return
    if current.isa:
        _activate(current.isa.lower(), "OXYTORCH_ISA")
    elif current.cpu_capability:
        _activate(_bounded(current.cpu_capability), "ATEN_CPU_CAPABILITY")
