"""The changes made to a model, each with the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.gradients import give_gradient
from ..core.own_storage import is_part, with_own_storage
from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight
from .conversions import ApplyToPacked
from .report import Entry, Report

ATTRIBUTE = "_oxytorch"
QUANTIZED = "_oxytorch_quantized"
"""The same for what `quantize_` did, which comes before optimizing and is taken back after it."""


class Change:
    """One change to one module."""

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        """Take the change back. restored: what each parameter has become (shared ones stay so)."""
        raise NotImplementedError

    def settle(self) -> None:
        """Free what was replaced, where it was kept: the change stays."""


class AttributeSet(Change):
    """A module got an attribute in its instance dictionary, such as a `forward` of ours."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module = module
        self.name = name
        self.value = value
        self.before = module.__dict__.get(name)
        module.__dict__[name] = value

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        if self.module.__dict__.get(self.name) is not self.value:
            return  # somebody has put another one there since
        del self.module.__dict__[self.name]
        if self.before is not None:
            self.module.__dict__[self.name] = self.before


@contextmanager
def forwards_set(forwards: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Within, modules have other forwards in their instance dictionaries."""
    changes = [AttributeSet(module, "forward", each) for module, each in forwards.items()]
    try:
        yield
    finally:
        for change in changes:
            change.undo({})


class ParameterSet(Change):
    """A parameter was given other contents, of the same values (up to its new dtype).

    The object stays the model's parameter, with its hooks, its gradient and what a user set on it,
    so that an optimizer that holds it goes on holding the model's parameter. Where an autograd
    graph or a weak reference holds it, torch gives it no other contents, and where only some of its
    owners change it must not have them: the owners hold another object then, and undoing gives them
    the former one back, with the values of then.

    owners: (module, name) of each that changes, the one given by default.
    is_shared: whether others than the owners hold the parameter too, which do not change.
    keeps_before: whether the contents that were replaced stay in memory until the change is
        settled; undoing gives them back. Otherwise undoing makes some of the values that there are.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parameter: nn.Parameter,
        *,
        owners: list[tuple[nn.Module, str]] | None = None,
        is_shared: bool = False,
        keeps_before: bool = False,
    ) -> None:
        before = module._parameters[name]
        assert before is not None
        self.module = module
        self.name = name
        self.owners = owners or [(module, name)]
        self.was_panels = isinstance(before, PanelWeight)
        self.dtype = before.dtype
        self.memory_format = _memory_format(before)
        contents = _replace(self.owners, before, parameter, may_swap=not is_shared)
        self.others = None if contents is not None else (before, parameter)
        self.contents = contents if keeps_before else None
        self.is_settled = not keeps_before

    def settle(self) -> None:
        self.contents, self.is_settled = None, True

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        now = self.module._parameters.get(self.name)
        if now is None:
            return
        holders = [own for own in self.owners if own[0]._parameters.get(own[1]) is now]
        if self.others is not None and now is self.others[1]:
            if now not in restored:
                restored[now] = self._former(self.others[0], now)
            _replace(holders, now, restored[now], may_swap=False)
            return
        contents = self.contents
        if contents is None:
            contents = nn.Parameter(self._values(now), now.requires_grad)
        is_as_before = type(contents) is nn.Parameter and contents.dtype == now.dtype
        if is_as_before and isinstance(now, PackedTensor):
            now.let_aliases_go(contents.detach())
        _replace(holders, now, contents)

    def _former(self, former: nn.Parameter, now: nn.Parameter) -> nn.Parameter:
        """The object that was replaced by another, `now`, with the values of this one."""
        if self.is_settled:
            values = self._values(now)
            if _give(former, nn.Parameter(values, now.requires_grad)) is None:
                former.data = values
        former.requires_grad_(now.requires_grad)
        if now.grad is not None:
            give_gradient(former, now.grad)
        return former

    def _values(self, now: nn.Parameter) -> torch.Tensor:
        if self.was_panels and isinstance(now, PanelWeight):
            return now.copy()
        values = now.values() if isinstance(now, PackedTensor) else now.detach()
        values = values.to(self.dtype)
        if values.layout == torch.strided:
            values = values.contiguous(memory_format=getattr(torch, self.memory_format))
            if values.untyped_storage().nbytes() > values.nbytes:  # a part of a joined one
                values = values.clone()
        return values


class Untied(Change):
    """A module got a parameter of its own in place of one that it shares with another module, which
    keeps it; undoing ties them again.

    holder: (module, name) of the other one.
    """

    def __init__(
        self, module: nn.Module, name: str, parameter: nn.Parameter, holder: tuple[nn.Module, str]
    ) -> None:
        self.module = module
        self.name = name
        self.holder = holder
        setattr(module, name, parameter)

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        module, name = self.holder
        setattr(self.module, self.name, module._parameters[name])


def _replace(
    owners: list[tuple[nn.Module, str]],
    before: nn.Parameter,
    parameter: nn.Parameter,
    may_swap: bool = True,
) -> nn.Parameter | None:
    """Give owners the contents of `parameter`; what holds those of before, or None where the owners
    have become those of `parameter` itself."""
    recurrent = [module for module, _ in owners if isinstance(module, nn.RNNBase)]
    for layer in recurrent:
        # Weak references keep a tensor from being swapped; layers like this one share the list.
        layer._flat_weight_refs.clear()
    contents = _give(before, parameter) if may_swap else None
    if contents is None:
        for module, name in owners:
            setattr(module, name, parameter)
    for layer in recurrent:
        refs: list[Any] = [partial(_itself, w) for w in layer._flat_weights]
        layer._flat_weight_refs[:] = refs
    return contents


def _itself(tensor: Any) -> Any:
    return tensor


def _give(object_: nn.Parameter, other: nn.Parameter) -> nn.Parameter | None:
    """Give a parameter the contents of another and return what holds its own ones; None where that
    cannot be done."""
    if object_ is other:
        return other
    gradient = object_.grad
    if _has_storage(object_) and _has_storage(other):
        contents = nn.Parameter(object_.data, object_.requires_grad)
        object_.grad = None
        object_.data = other.data  # also where an autograd graph or a weak reference holds it
        give_gradient(object_, gradient)
        return contents
    if not _swapped(object_, other):
        return None
    if gradient is not None:
        give_gradient(object_, gradient)
    return other


def _has_storage(parameter: nn.Parameter) -> bool:
    """Whether torch knows all of a parameter: no class of its own says how to compute with it."""
    return type(parameter).__torch_dispatch__ == nn.Parameter.__torch_dispatch__


def _swapped(object_: nn.Parameter, other: nn.Parameter) -> bool:
    """Swap two parameters but for what a user gave the first; False where it cannot be done."""
    torch.clear_autocast_cache()  # it refers weakly to parameters
    kind, fields = type(object_), object_.__dict__
    requires_grad = object_.requires_grad
    hooks = {name: getattr(object_, name, None) for name in _HOOKS}
    try:
        torch.utils.swap_tensors(object_, other)  # type: ignore[no-untyped-call]
    except RuntimeError:  # held by an autograd graph or a weak reference
        if type(object_) is not kind:  # torch swaps these before it asks whether the rest can be
            object_.__class__, other.__class__ = kind, type(object_)
            object_.__dict__, other.__dict__ = fields, object_.__dict__
        return False
    ours = {name for each in (object_, other) for name in _own_names(each)}
    object_.__dict__.update({n: value for n, value in other.__dict__.items() if n not in ours})
    object_.requires_grad_(requires_grad)
    for name, registered in hooks.items():
        if registered is not None:  # torch leaves them with the object, but calls them no more
            setattr(object_, name, registered)
    return True


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _own_names(parameter: nn.Parameter) -> tuple[str, ...]:
    return parameter._own_names() if isinstance(parameter, PackedTensor) else ()


class BufferSet(Change):
    """A buffer, which stays the same object, was given values in another dtype."""

    def __init__(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        self.module = module
        self.name = name
        own = module._buffers[name]
        assert own is not None
        self.own = own
        self.before = own.data
        own.data = buffer

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        now, before = self.own.data, self.before
        ours, theirs = (_dense(t) for t in (now, before.to(now.dtype)))
        was_written = not torch.allclose(ours, theirs, 0, 0, equal_nan=True)
        self.own.data = now.to(before.dtype) if was_written else before


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class HookAdded(Change):
    """A hook of ours was registered on a module; `registry` names the dictionary that holds it."""

    def __init__(self, module: nn.Module, registry: str, key: int) -> None:
        self.module = module
        self.registry = registry
        self.key = key

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        getattr(self.module, self.registry).pop(self.key, None)


def _memory_format(tensor: torch.Tensor) -> str:
    """The name of a tensor's memory format (the format itself cannot be pickled)."""
    for dim, name in ((4, "channels_last"), (5, "channels_last_3d")):
        if tensor.layout != torch.strided:
            break
        plain = tensor.dim() != dim or tensor.is_contiguous()
        if not plain and tensor.is_contiguous(memory_format=getattr(torch, name)):
            return name
    return "contiguous_format"


class ChangeLog:
    """What was done to a model: the changes, each with the way back, and the report.

    It is kept on the model, in one attribute for `quantize_` and one for what comes after it.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.changes: list[Change] = []

    def set_forward(self, module: nn.Module, forward: Any) -> None:
        """Put a forward of ours before that of the module's class."""
        self.changes.append(AttributeSet(module, "forward", forward))

    def add_hook(self, module: nn.Module, registry: str, handle: Any) -> None:
        """Note a hook that was registered; registry: the attribute that holds it."""
        self.changes.append(HookAdded(module, registry, handle.id))

    def prepare_for_packed(self, module: nn.Module) -> None:
        """Let a module's state dictionary have plain tensors of their own (see `plain_state`), and
        conversions that change nothing leave its parameters alone."""
        if plain_state in module._state_dict_hooks.values():
            return
        self.changes.append(AttributeSet(module, "_apply", ApplyToPacked(module)))
        handle = module.register_state_dict_post_hook(plain_state)  # type: ignore[no-untyped-call]
        self.add_hook(module, "_state_dict_hooks", handle)

    def applied(self, pass_name: str, path: str, detail: str) -> None:
        """Report what a pass did at the module of this path."""
        self.report.entries.append(Entry(pass_name, path, True, detail))

    def skipped(self, pass_name: str, path: str, reason: str) -> None:
        """Report what a pass left as it was, and why."""
        self.report.entries.append(Entry(pass_name, path, False, reason))

    def forwards(self) -> list[Any]:
        """The forwards that were set."""
        sets = [change for change in self.changes if isinstance(change, AttributeSet)]
        return [change.value for change in sets if change.name == "forward"]

    def settle(self, begin: int = 0) -> None:
        """Free what the changes from number `begin` on replaced: these stay."""
        for change in self.changes[begin:]:
            change.settle()

    def undo(self, begin: int = 0) -> None:
        """Take back the changes from number `begin` on, the last one first."""
        restored: dict[nn.Parameter, nn.Parameter] = {}
        while len(self.changes) > begin:
            self.changes.pop().undo(restored)


def plain_state(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Give the state dictionary plain tensors where the module holds packed ones, or what it holds
    does (a parametrization of a packed weight), and tensors with storages of their own where it
    holds parts of a joined one.

    The parameters themselves, which `keep_vars=True` asks for, stay in it.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if state.get(prefix + name, parameter) is parameter:
            continue
        if isinstance(parameter, PackedTensor):
            state[prefix + name] = parameter.plain()
        elif is_part(parameter):
            state[prefix + name] = with_own_storage(parameter)


def log_of(model: nn.Module, attribute: str = ATTRIBUTE) -> ChangeLog | None:
    """Return what was done to a model, or None where `optimize` has not been here.

    attribute: QUANTIZED asks for what `quantize_` did.
    """
    found = model.__dict__.get(attribute)
    return found if isinstance(found, ChangeLog) else None
