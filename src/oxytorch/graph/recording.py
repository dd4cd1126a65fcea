"""Runs a model under a record, and compares the records of two runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.modes import FunctionsTo
from ..core.sources import GLOBAL_HOOKS
from .code import is_constant
from .errors import CaptureError
from .record import Record, grad_modes, is_of_torch
from .state import State
from .steps import is_same


def recorded(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State | None = None,
) -> tuple[Record, Any]:
    """Run a model without gradients and return the record of the run, and its output.

    is_leaf: the modules that are called as a whole, however they compute.
    state: what is to keep that which the run writes to.
    """
    if any(GLOBAL_HOOKS):
        raise CaptureError("hooks for all modules are registered")
    for module in model.modules():
        if not is_of_torch(type(module)._call_impl):
            raise CaptureError(f"{type(module).__name__} has a _call_impl of its own")
    record = Record(model, is_leaf, None if state is None else state.show)
    attributes = _Attributes(model)
    with torch.no_grad():
        record.modes = grad_modes()
        with (
            _calls_noted(model, record),
            record.watch.watching(),
            FunctionsTo(record.function),
            record,
            nullcontext() if state is None else state.writing(),
        ):
            output = model(*args, **kwargs)
    for call in record.calls:
        if call.refusal is None and attributes.changed(call.module):
            call.refusal = "its code keeps a state in an attribute"
    return record, output


def are_alike(run: Record, again: Record) -> bool:
    """Whether the code did the same in two runs on the same input."""
    if len(run.steps) != len(again.steps) or len(run.calls) != len(again.calls):
        return False
    return all(map(is_same, run.steps, again.steps))


def refuse_differences(run: Record, again: Record) -> None:
    """Refuse the calls of a run whose code did something else in a second run on the same input."""
    same_length = len(run.steps) == len(again.steps) and len(run.calls) == len(again.calls)
    for first, second in zip(run.steps, again.steps, strict=False):
        if not is_same(first, second):
            call = run.calls[first.call]
            call.refusal = call.refusal or "its code does something else in a second run"
    if not same_length:
        for call in run.calls:
            call.refusal = call.refusal or "two runs on one input differ"


def refuse_same(run: Record, first: Record) -> None:
    """Refuse the calls of a run that were refused in the first one, which made what was found."""
    for call, before in zip(run.calls, first.calls, strict=False):
        if call.module is before.module:
            call.refusal = call.refusal or before.refusal


@contextmanager
def _calls_noted(model: nn.Module, record: Record) -> Iterator[None]:
    """Tell the record of each module's calls on this thread."""
    thread = threading.get_ident()

    def noting(note: Callable[..., None], takes_arguments: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs_or_output: Any) -> None:
            if threading.get_ident() == thread:
                with record.watch.looking_away():
                    given = (args, kwargs_or_output) if takes_arguments else (kwargs_or_output,)
                    note(module, *given)

        return hook

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                continue
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            begin, end = noting(record.enter, True), noting(record.leave, False)
            if module._forward_hooks or module._forward_pre_hooks:
                begin = noting(record.enter_hooks, True)
                end = noting(record.leave_last_hooks, False)
                last = noting(record.leave_hooks, True)
                first = noting(record.enter_last_hooks, False)
                hooks.enter_context(before(last, with_kwargs=True))
                hooks.enter_context(after(first, prepend=True))
            hooks.enter_context(before(begin, with_kwargs=True, prepend=True))
            hooks.enter_context(after(end))
        yield


class _Attributes:
    """The attributes of all modules, to see whether a run changes one."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            m: {k: (v, _inside(v)) for k, v in m.__dict__.items()} for m in model.modules()
        }

    def changed(self, module: nn.Module) -> bool:
        before, now = self._before[module], module.__dict__
        if len(before) != len(now):
            return True
        for name, (value, inside) in before.items():
            found = now.get(name)
            if found is not value:
                return True
            if name[0] != "_" and inside is not None and _inside(found) != inside:
                return True
        return False


def _inside(value: Any) -> Any:
    """What a container or an object holds, by identity; None for what holds nothing."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*map(id, value)]
    if isinstance(value, dict):
        return [(id(k), id(v)) for k, v in value.items()]
    if is_constant(value) or isinstance(value, (Tensor, nn.Module)) or callable(value):
        return None
    found = getattr(value, "__dict__", None)
    return None if found is None else [(k, id(v)) for k, v in found.items()]
