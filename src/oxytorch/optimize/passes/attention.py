"""Pass `attention`: the attention that a module computes with torch's function, by our op.

Which modules call the function themselves is seen in the run on the sample input. Their forward
then runs under a torch function mode that sends this one function to `ops.attention`; nothing is
patched, and nothing outside of these modules is affected. The mode costs a little at every function
that the module calls, so that both are timed on the sample's tensors before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ... import isa
from ...core.modes import OwnFunctionMode, is_plain_inference
from ...graph.forward import Forward
from ...ops.attention import is_fast, scaled_dot_product_attention
from ...rewriting.measure import first_win
from ..context import AttentionCall, OptimizeContext


class _OurAttention(OwnFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class AttentionForward(Forward):
    """A module's forward, its own or the one that a pass gave it, with attention in our op."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_plain_inference():
            return self.inner(*args, **kwargs)
        with _OurAttention():
            return self.inner(*args, **kwargs)


def run(context: OptimizeContext) -> None:
    for module, call in context.observed.attention.items():
        if module in context.closed:
            continue
        if not is_fast():
            context.skipped("attention", module, f"torch's own is as fast at level {isa.active()}")
            continue
        if not _pays(context, module, call):
            context.skipped("attention", module, "torch's own is as fast here")
            continue
        context.log.set_forward(module, AttentionForward(module))
        context.applied("attention", module, "scaled dot-product attention -> ops.attention")


def _pays(context: OptimizeContext, module: nn.Module, call: AttentionCall) -> bool:
    """Whether the module is faster with our op, and the mode around it, for such a call."""
    below = (context.dtype_of.get(m) for m in module.modules())
    dtype = next((dtype for dtype in below if dtype is not None), None)
    args, kwargs = pytree.tree_map(lambda leaf: _converted(leaf, dtype), call.arguments)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return False
    form = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)

    def plain() -> Tensor:
        for _ in range(call.others):
            tensors[0].dim()
        return F.scaled_dot_product_attention(*args, **kwargs)

    def ours() -> Tensor:
        with _OurAttention():
            return plain()

    return first_win(("attention", form, call.others), [(plain, ours)]) is not None


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_floating and dtype is not None else leaf
