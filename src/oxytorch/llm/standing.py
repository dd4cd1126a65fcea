"""Whether what was made of modules still computes what they would: asked before each use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..core.modes import is_plain_inference, must_run_plain
from ..core.packed import PackedTensor
from ..core.sources import Sources
from .skipped import Found, SkippedCode, methods_of
from .weights import stored_form

_TABLES = ("_modules", "_parameters", "_buffers")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


class Standing:
    """Says whether a record may stand in for a module.

    owner: the module.
    record: what was made of it; it reads the memory of the modules' parameters, so that it follows
        values that are written there.
    skips_owner: whether the owner's own call is skipped too, with its hooks.

    After a change it is looked at once what that was. Where only values were written, the record
    goes on with them. After anything else (a module replaced or wrapped, a hook, a mode, a setting,
    another parameter, other code of their classes) the modules' own code has to run, until all is
    as it was.
    """

    def __init__(self, owner: nn.Module, record: Any, skips_owner: bool = False) -> None:
        self.owner = owner
        self.record = record
        self.skips_owner = skips_owner
        self.renewals = 0
        self._structure: dict[tuple[str, str], Any] | None = None
        self._is_copy = False
        self._code_before: Found | None = None
        self._begin()

    def _begin(self) -> None:
        self._weights: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._buffers: list[tuple[int, int, int]] = []
        self._has_hooks = False
        self._code: SkippedCode | None = None
        self._sources: Sources | None = None
        self._refused: Sources | None = None

    def note(self) -> None:
        """Take the modules as they are now as what the record was made of."""
        self._structure = _structure(self.owner)
        self._is_copy = False
        self._code = SkippedCode(self.owner.modules())
        self._note_values()

    def holds(self) -> bool:
        """Whether the record may be used now."""
        sources = self._sources
        if sources is None or not sources.are_current():
            if self._structure is None:
                return False  # it is not finished yet
            if not self._renewed():
                return False
        if self._code is None or not self._code.is_current():
            return False
        return not self._has_hooks or not _collects_attentions()

    def allows(self, *tensors: Tensor) -> bool:
        """Whether it may be used in a call with these tensors."""
        if is_dynamo_compiling():
            return False
        if not is_plain_inference() and must_run_plain(*tensors, *self.owner.parameters()):
            return False
        return self.holds()

    def _note_values(self) -> None:
        self._weights = [
            (module, name, parameter)
            for module in self.owner.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._buffers = _places(self.owner)
        if self._code is None:
            self._code = SkippedCode(self.owner.modules(), self._code_before)
        self._sources = self._noted()
        self._refused = None

    def _noted(self) -> Sources:
        modules = [*self.owner.modules()]
        methods = [(module, name) for module in modules for name in methods_of(type(module))]
        if self.skips_owner:
            return Sources(modules, methods=methods)
        return Sources(modules[1:], owner=self.owner, methods=methods)

    def _renewed(self) -> bool:
        """After a change: whether nothing but values did, which the record then reads."""
        if self._refused is not None and self._refused.are_current():
            return False
        self._refused = None
        if not self._is_as_before():
            self._refused = self._noted()
            return False
        tables = [module._parameters.values() for module in self.owner.modules()]
        weights: list[Any] = [p for table in tables for p in table if isinstance(p, PackedTensor)]
        if not all(weight.is_packed() for weight in weights):
            return False  # until nobody holds the plain values any more
        for part in parts_of(self.record):
            part.renew()
        self.renewals += 1
        self._is_copy = False
        self._note_values()
        return True

    def _is_as_before(self) -> bool:
        if not self._is_copy:
            same = all(m._parameters.get(name) is own for m, name, own in self._weights)
            if not same or not self._follows_buffers():
                return False
        assert self._structure is not None
        now = _structure(self.owner)
        loose = self._is_copy
        if not all(_is_same(then, now.get(key), loose) for key, then in self._structure.items()):
            return False
        is_watched, self._has_hooks = _watched(self.owner, self.skips_owner)
        return not is_watched and self._reads_the_weights()

    def _follows_buffers(self) -> bool:
        """Whether the record still goes with the modules' buffers."""
        return _places(self.owner) == self._buffers

    def _reads_the_weights(self) -> bool:
        """Whether the record reads the memory of the modules' parameters."""
        known = {_memory(tensor) for tensor in tensors_of(self.record)}
        return all(_memory(p) in known for p in self.owner.parameters())

    def __getstate__(self) -> dict[str, Any]:
        # A copy looks at its own modules at its first use.
        held = self._structure is not None and self.holds()
        return {
            "owner": self.owner,
            "record": self.record,
            "skips_owner": self.skips_owner,
            "renewals": self.renewals,
            "_structure": self._structure if held else None,
            "_is_copy": True,
            "_code_before": self._code_before if self._code is None else self._code.found,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def parts_of(record: Any) -> Iterator[Any]:
    """All records in a record that have something to renew, itself among them."""
    if isinstance(record, (list, tuple)):
        for item in record:
            yield from parts_of(item)
    elif dataclasses.is_dataclass(record):
        if hasattr(record, "renew"):
            yield record
        for part in dataclasses.fields(record):
            yield from parts_of(getattr(record, part.name))


def tensors_of(record: Any) -> Iterator[Tensor]:
    """All tensors of a record, of the records in it and of the modules that these name."""
    if isinstance(record, Tensor):
        yield record
    elif isinstance(record, nn.Module):
        for parameter in record._parameters.values():
            if parameter is not None:
                yield parameter
    elif isinstance(record, (list, tuple)):
        for item in record:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(record):
        for part in dataclasses.fields(record):
            yield from tensors_of(getattr(record, part.name))


def _memory(tensor: Tensor) -> int:
    """Where the memory begins in which a weight is stored."""
    stored: Any = stored_form(tensor)
    plain: Tensor = getattr(stored, "packed", stored)
    return plain.untyped_storage().data_ptr()


def _places(owner: nn.Module) -> list[tuple[int, int, int]]:
    """Which buffers there are, and how often each was written to."""
    return [
        (id(buffer), 0 if buffer.is_inference() else buffer._version, buffer.data_ptr())
        for buffer in owner.buffers()
    ]


def _structure(owner: nn.Module) -> dict[tuple[str, str], Any]:
    """All of a module and of those in it that decides what they compute, but tensors and hooks.

    By path and name: classes, children, names of parameters, and all other attributes.
    """
    found: dict[tuple[str, str], Any] = {}
    for path, module in owner.named_modules(remove_duplicate=False):
        found[path, "class"] = type(module)
        found[path, "children"] = (*module._modules,)
        found[path, "parameters"] = (*module._parameters,)
        found[path, "forward"] = module.__dict__.get("forward")
        for name, value in module.__dict__.items():
            own = name in _TABLES or name in _HOOKS or name == "forward"
            if not own and not name.startswith("_oxytorch"):
                found[path, name] = value
        for name in methods_of(type(module)):
            found.setdefault((path, name), None)  # unless an attribute hides it
    return found


def _is_same(then: Any, now: Any, loose: bool) -> bool:
    """Whether an attribute is what it was; loose: of a copy, whose objects are others."""
    if then is now or (then is None and isinstance(now, Tensor)):
        return True  # a value that was found out and kept, as the model's own code does
    if type(then) is not type(now):
        return False
    if isinstance(then, _PLAIN) or type(then) in (tuple, set, dict, list):
        try:
            return bool(then == now)
        except RuntimeError:  # tensors in it
            return False
    return loose


def _watched(owner: nn.Module, with_owner: bool) -> tuple[bool, bool]:
    """Whether someone wants to see the call of a module, and whether transformers may want to."""
    has_idle = False
    modules = torch.nn.modules.module
    if any(getattr(modules, f"_global{name}") for name in _HOOKS):
        return True, False
    for part in owner.modules():
        if part is owner and not with_owner:
            continue
        if any(part.__dict__.get(name) for name in _HOOKS):
            if not _only_idle_hooks(part):
                return True, False
            has_idle = True
    return False, has_idle


def _only_idle_hooks(part: nn.Module) -> bool:
    """Whether a part's hooks are those of transformers that record outputs."""
    hooks = part._forward_hooks.values()
    others = any(part.__dict__.get(name) for name in _HOOKS[1:])
    return not others and all(
        getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")
        for hook in hooks
    )


def _collects_attentions() -> bool:
    """Whether transformers' hooks record what only a module's own code shows."""
    try:
        from transformers.utils.output_capturing import _active_collector as collector
    except ImportError:  # releases before 5 wrap forwards instead
        return True
    collected = collector.get()  # type: ignore[no-untyped-call]
    return collected is not None and "attentions" in collected
