"""Run the original and the optimized model side by side and find where they part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.agreement import TOLERANCE, difference
from ..graph.state import State
from .sample import SampleInput


class VerificationError(AssertionError):
    """The optimized model's outputs differ from the original's beyond the tolerance."""

    __module__ = "oxytorch"  # where its public name is


def compare(original: nn.Module, optimized: nn.Module, sample: SampleInput) -> dict[str, float]:
    """Compare every changed module on the original's inputs, then the whole models.

    Returns the whole models' difference, the difference allowed and the number of modules
    compared. Raises VerificationError naming the first module, in order of execution, that differs
    by more than the tolerance.
    """
    allowed = TOLERANCE[_narrowest(optimized)]
    modules = _Modules(original, optimized, sample.written(original), allowed)
    with modules.compared(), sample.running(original, optimized), torch.no_grad():
        reference = pytree.tree_map(_copy, sample.given_to(original))
    with sample.running(optimized), torch.no_grad():
        result = pytree.tree_map(_copy, sample.given_to(optimized))
    gap = difference(reference, result)
    if gap == float("inf"):
        raise VerificationError(
            f"optimize: verify: the output of {type(optimized).__name__} has NaN, infinities or a "
            "shape where the original's has not, though no single module's does: masks and inputs "
            "may be too large for dtype (torch.finfo(dtype).max); keep some modules in float32 "
            "through dtype={...}"
        )
    if not gap <= allowed:
        raise VerificationError(
            f"optimize: verify: the output of {type(optimized).__name__} differs from the "
            f"original's by {gap:.2e} of its largest value, allowed {allowed:.2e}, though "
            "no single module does: errors add up, or code behind a module enlarges its error; "
            "keep modules in float32 through dtype={...}, one at a time to find which (the page "
            "Troubleshooting has a loop)"
        )
    return {"difference": gap, "allowed": allowed, "modules": float(modules.count)}


class _Modules:
    """Runs the counterpart of each changed module beside it, and compares what they return.

    written: ids of tensors that code around a layer writes to, which its counterpart lacks.
    """

    def __init__(
        self, original: nn.Module, optimized: nn.Module, written: set[int], allowed: float
    ) -> None:
        self.allowed = allowed
        self.count = 0
        counterparts = dict(optimized.named_modules())
        self._changed = {
            module: (path, counterparts[path])
            for path, module in original.named_modules()
            if path
            and "forward" in counterparts[path].__dict__
            and not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
            and written.isdisjoint(map(id, (*module.parameters(), *module.buffers())))
        }
        self._found: dict[nn.Module, Any] = {}

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare in runs of the original."""
        with ExitStack() as hooks:
            for module in self._changed:
                hooks.enter_context(
                    module.register_forward_pre_hook(self._before, with_kwargs=True)
                )
                hooks.enter_context(module.register_forward_hook(self._after))
            yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        state = State([[args, kwargs]], None)  # which the callee may write to
        with torch.no_grad():
            try:
                found = self._changed[module][1](*args, **kwargs)
                self._found[module] = pytree.tree_map(_copy, found)
            finally:
                state.restore()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self._found:
            return
        self.count += 1
        gap = difference(output, self._found.pop(module))
        if not gap <= self.allowed:
            path, _ = self._changed[module]
            raise VerificationError(
                f"optimize: verify: {path} ({type(module).__name__}) differs from the original by "
                f"{gap:.2e} of its largest output, allowed {self.allowed:.2e}; "
                f"leave it as it is (dtype={{..., {path!r}: torch.float32}}) or fewer passes"
            )


def _narrowest(model: nn.Module) -> torch.dtype:
    found = {p.dtype for p in model.parameters()}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in found:
            return dtype
    return torch.float32


def _copy(leaf: Any) -> Any:
    """A tensor's values as they are now: runs may write to it later."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
