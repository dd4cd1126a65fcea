"""The forward that replaces a module's own: the rewritten graph as Python, with its guards."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .capture import CallForm, CaptureError, Capturer
from .patterns import MODAL, Rewrite

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)

MOST_VARIANTS = 16


class Variant:
    """One rewritten graph: its call form, source text and the objects that the text names."""

    def __init__(self, rewrite: Rewrite) -> None:
        capture = rewrite.capture
        code = capture.graph.python_code("self")
        self.form = capture.form
        self.module = capture.module
        self.fused = rewrite.fused
        self.needs_no_gradient = bool(rewrite.folds)
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

    The guards: it and the dropout and normalization layers that it goes past are in evaluation
    mode, no module that it goes past has a hook, the call has a captured form, and, where a
    normalization was folded, no gradient is asked for.
    A form that fixes shapes is captured anew for other shapes, MOST_VARIANTS in all.
    """

    def __init__(self, module: nn.Module, rewrites: list[Rewrite]) -> None:
        self.module = module
        self.recognizer = rewrites[0].recognizer.within(module)
        self.choices = rewrites[0].choices
        self.folds = {key: f for r in rewrites for key, f in r.folds.items()}
        self.fixes_shapes = any(r.capture.form.fixes_shapes for r in rewrites)
        self.refused: set[CallForm] = set()
        self.inlined = [*dict.fromkeys(m for r in rewrites for m in r.capture.inlined)]
        self.bypassed = [*self.inlined, *dict.fromkeys(m for r in rewrites for m in r.consumed)]
        self.variants = [Variant(rewrite) for rewrite in rewrites]
        self._watch()

    def _watch(self) -> None:
        self._modal = [self.module, *(m for m in self.bypassed if type(m) in MODAL)]
        self._hooks = (
            *_GLOBAL_HOOKS,
            *(m._forward_hooks for m in self.bypassed),
            *(m._forward_pre_hooks for m in self.bypassed),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(self._hooks) and not any(m.training for m in self._modal):
            variant = self._variant(args, kwargs)
            if variant is not None and not (
                variant.needs_no_gradient
                and torch.is_grad_enabled()
                and _wants_gradient(self.module, args)
            ):
                return variant.run(*variant.form.variables(args, kwargs))
        return type(self.module).forward(self.module, *args, **kwargs)

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
        for variant in self.variants:
            if variant.form.matches(args, kwargs):
                return variant
        if not self.fixes_shapes or len(self.variants) >= MOST_VARIANTS:
            return None
        form = CallForm.of(args, kwargs, shapes=True)
        if form in self.refused:
            return None
        try:
            capture = Capturer(self.recognizer.keeps_whole).capture(self.module, form)
        except CaptureError:
            self.refused.add(form)
            return None
        self.variants.append(
            Variant(Rewrite(capture, self.recognizer, self.choices, self.folds).run())
        )
        return self.variants[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_hooks", "_modal")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


def _wants_gradient(module: nn.Module, args: tuple[Any, ...]) -> bool:
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in args
    )
