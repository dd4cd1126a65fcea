"""Optimizes the models of a script that does not ask for it: `oxytorch run --optimize`.

`install` makes `model.eval()` also mark the model. Its first call outside of gradients, as the
outermost module, runs `oxytorch.optimize(model, inplace=True)`. Nothing else is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.modes import is_plain_inference
from ..optimize import optimize
from ..optimize.sample import sample_of_call
from ..rewriting.changes import ATTRIBUTE, QUANTIZED, log_of

WRAPPERS = ("torch._dynamo.", "torch.nn.parallel.", "torch.distributed.")
"""Where classes come from whose modules run others in their own way, and are left alone."""


@dataclass(frozen=True)
class Settings:
    """What is done to models.

    dtype: that they are converted to; None keeps theirs.
    sample: also run the model twice on the arguments of its first call, so that operators are
        fused.
    """

    dtype: torch.dtype | None = None
    sample: bool = False

    def __str__(self) -> str:
        text = "models are optimized at their first call in evaluation mode"
        text += f", in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        return text + (", with its inputs as the sample" if self.sample else "")


installed: Settings | None = None
"""What `install` was called with; None in processes that optimize what they are asked to."""
_calls = threading.local()
_lock = threading.RLock()


def install(settings: Settings) -> None:
    """Have models of this process optimized once they are in evaluation mode and called."""
    global installed
    if installed is None:
        nn.Module.train = _marking(nn.Module.train)  # type: ignore[method-assign]
    installed = settings


def _marking(train: Any) -> Any:
    """`nn.Module.train`, which also marks the outermost module that enters evaluation mode."""

    @functools.wraps(train)
    def marking(self: nn.Module, mode: bool = True) -> nn.Module:
        depth = getattr(_calls, "depth", 0)
        _calls.depth = depth + 1
        try:
            result: nn.Module = train(self, mode)
        finally:
            _calls.depth = depth
        if depth == 0 and mode is False and not _is_marked(self) and _is_of_interest(self):
            self.register_forward_pre_hook(_first_call, prepend=True, with_kwargs=True)
        return result

    return marking


class _FirstCall:
    """The forward pre-hook of a marked module."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training or torch.is_grad_enabled() or not is_plain_inference():
            return  # the mark stays for a call that could be faster
        with _lock:
            if _is_marked(model):
                _optimize(model, args, kwargs)

    def __deepcopy__(self, memo: Any) -> _FirstCall:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is saved as a whole loads where there is no oxytorch: what stands there in
        # the hook's place takes any arguments and does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


_first_call = _FirstCall()


def _optimize(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Optimize a model, or say why not; an error of ours never becomes the script's."""
    assert installed is not None
    for module in model.modules():
        _unmark(module)
    name = type(model).__name__
    if next(model.parameters(), None) is None:
        return
    if reason := _reason_to_leave(model):
        _say(f"{name} runs as it is: {reason}")
        return
    sample = sample_of_call(model, args, kwargs) if installed.sample else None
    try:
        optimize(model, dtype=installed.dtype, sample_input=sample, inplace=True)
    except Exception as error:
        _say(f"{name} runs as it is: {type(error).__name__}: {error}")
        return
    log = log_of(model)
    assert log is not None
    modules = len({entry.module for entry in log.report.applied})
    what = f"{modules} module{'s' * (modules != 1)} optimized" if modules else "nothing to optimize"
    hint = "" if modules or installed.sample else "; --sample-first-call finds more"
    _say(f"{name}: {what}{hint}")


def _reason_to_leave(model: nn.Module) -> str:
    """Why a model is not to be changed; an empty string if it may be."""
    for module in model.modules():
        if log_of(module, ATTRIBUTE) is not None or log_of(module, QUANTIZED) is not None:
            return "oxytorch has changed it already"
    parameters = [*model.parameters()]
    if not any(parameter.device.type == "cpu" for parameter in parameters):
        return "no parameters on the CPU"
    if any(parameter.grad is not None for parameter in parameters):
        return "it is being trained"
    mine = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            groups = vars(found).get("param_groups", [])
            if any(id(parameter) in mine for group in groups for parameter in group["params"]):
                return f"{type(found).__name__} trains it"
    return ""


def _is_of_interest(module: nn.Module) -> bool:
    kind = type(module)
    return not isinstance(module, torch.jit.ScriptModule) and not kind.__module__.startswith(
        WRAPPERS
    )


def _is_marked(module: nn.Module) -> bool:
    return any(hook is _first_call for hook in module._forward_pre_hooks.values())


def _unmark(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        return
    for key in [k for k, hook in module._forward_pre_hooks.items() if hook is _first_call]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _say(text: str) -> None:
    print(f"oxytorch run --optimize: {text}", file=sys.stderr, flush=True)
