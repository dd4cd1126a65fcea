"""Pass `attention`: the attention that a module computes with torch's function, by our op.

Which modules call the function themselves is seen in the run on the sample input. Their forward
then runs under a torch function mode that sends this one function to `ops.attention`; nothing is
patched, and nothing outside of these modules is affected.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from ... import isa
from ...core.modes import OwnFunctionMode, is_plain_inference
from ...graph.forward import Forward
from ...ops.attention import FAST_LEVELS, scaled_dot_product_attention
from ..context import Context


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


def run(context: Context) -> None:
    for module in context.observed.attention:
        if module in context.closed:
            continue
        if isa.active() not in FAST_LEVELS:
            context.left("attention", module, f"torch's own is as fast at level {isa.active()}")
            continue
        context.set_forward(module, AttentionForward(module))
        context.did("attention", module, "scaled dot-product attention -> ops.attention")
