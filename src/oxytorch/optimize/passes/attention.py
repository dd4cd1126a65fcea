"""Pass `attention`: the attention that a module computes with torch's function, by our op.

Which modules call the function themselves is seen in the run on the sample input. Their forward
then runs under a torch function mode that sends this one function to `ops.attention`; nothing is
patched, and nothing outside of these modules is affected. The mode costs a little at every function
that the module calls, so that both are timed on the sample's tensors before. A call with so much
less than the sample has that the mode would cost more than it spares goes without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ... import isa
from ...core.modes import OwnFunctionMode, is_plain_inference
from ...graph.forward import Forward, first_numel
from ...ops.attention import is_fast, scaled_dot_product_attention
from ...rewriting import measure
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
    """A module's forward, its own or the one that a pass gave it, with attention in our op.

    least: elements of the first tensor of a call below which it is not worth the mode.
    """

    def __init__(self, module: nn.Module, least: int) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", self.own)
        self.least = least

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_plain_inference() or first_numel(args, kwargs) < self.least:
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
        least = _least(context, module, call)
        if least is None:
            context.skipped("attention", module, "torch's own is as fast here")
            continue
        context.log.set_forward(module, AttentionForward(module, least))
        context.applied("attention", module, "scaled dot-product attention -> ops.attention")


def _least(context: OptimizeContext, module: nn.Module, call: AttentionCall) -> int | None:
    """From how many elements of the module's first tensor on our op, and the mode around it, are
    faster than torch's function; None where they are not for such a call."""
    below = (context.dtype_of.get(m) for m in module.modules())
    dtype = next((dtype for dtype in below if dtype is not None), None)
    args, kwargs = pytree.tree_map(lambda leaf: _converted(leaf, dtype), call.arguments)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return None
    form = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)

    def others() -> None:
        for _ in range(call.others):
            tensors[0].dim()

    def mode() -> None:
        with _OurAttention():
            others()

    def plain() -> Tensor:
        others()
        return F.scaled_dot_product_attention(*args, **kwargs)

    def ours() -> Tensor:
        with _OurAttention():
            return plain()

    key = "attention", form, call.others
    if first_win(key, [(plain, ours)]) is None:
        return None
    calls = [] if context.run is None else context.run.calls
    given = next((own.given for own in calls if own.module is module), None)
    if not measure.TIMED or given is None:
        return 0
    spent, taken, spared = measure.seconds_of(key, lambda: [mode, ours, plain])
    # What our op spares grows with its inputs, what the mode takes does not.
    part = spent / max(spared - taken + spent, spent)
    return int(part * first_numel(*given))


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_floating and dtype is not None else leaf
