"""The forward that replaces a module's own: the rewritten graph as plain Python, with its guards."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .capture import Capture, CallForm

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)


class Variant:
    """One rewritten graph: its call form, source text and the objects that the text names."""

    def __init__(self, capture: Capture, fused: dict[str, Any], needs_no_gradient: bool) -> None:
        code = capture.graph.python_code("self")
        self.form = capture.form
        self.module = capture.module
        self.fused = fused
        self.needs_no_gradient = needs_no_gradient
        self.source = code.src
        self.globals = {k: v for k, v in code.globals.items() if not k.startswith("__")}
        self.m: nn.Module = capture.module
        self.run = self._compiled()

    def _compiled(self) -> Callable[..., Any]:
        for name, fused in self.fused.items():
            setattr(self, name, fused)
        scope = dict(self.globals)
        exec(compile(self.source, f"<oxytorch {type(self.module).__name__}>", "exec"), scope)
        return types.MethodType(scope["forward"], self)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("run", *self.fused)}
        state["globals"] = {k: _named(v) for k, v in self.globals.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.globals = {k: _resolved(v) for k, v in state["globals"].items()}
        self.run = self._compiled()


def _named(value: Any) -> Any:
    return ("module", value.__name__) if isinstance(value, types.ModuleType) else ("value", value)


def _resolved(named: tuple[str, Any]) -> Any:
    kind, value = named
    return importlib.import_module(value) if kind == "module" else value


class Region:
    """Stands in for `module.forward`; runs a variant where its guards hold, else the original.

    The guards: the module is in evaluation mode, no module whose code is inlined has a hook, the
    call has a captured form, and, where a normalization was folded, no gradient is asked for.
    """

    def __init__(self, module: nn.Module, inlined: list[nn.Module]) -> None:
        self.module = module
        self.variants: list[Variant] = []
        self.inlined = inlined
        self._watch()

    def _watch(self) -> None:
        self._hooks = (
            *_GLOBAL_HOOKS,
            *(m._forward_hooks for m in self.inlined),
            *(m._forward_pre_hooks for m in self.inlined),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training and not any(self._hooks):
            for variant in self.variants:
                if variant.form.matches(args, kwargs):
                    if variant.needs_no_gradient and torch.is_grad_enabled():
                        if _wants_gradient(self.module, args):
                            break
                    return variant.run(*variant.form.variables(args, kwargs))
        return type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


def _wants_gradient(module: nn.Module, args: tuple[Any, ...]) -> bool:
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in args
    )


__all__ = ["CallForm", "Region", "Variant"]
