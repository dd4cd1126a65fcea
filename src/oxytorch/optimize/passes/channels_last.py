"""Pass `channels_last`: the weights of convolutions that `pack` leaves, in channels-last order.

With a weight in that order torch computes the convolution, and what follows it, channels-last. The
order stays within a call of the model, as that of packed convolutions does (graph/formats.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.watched import is_parameter
from ...graph.formats import ModelForward, kept
from ...graph.forward import Forward
from ..context import OptimizeContext
from .pack import is_order_free

_FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


class OrderedForward(Forward):
    """The forward of a convolution with a weight in channels-last order: its own, or the one that
    a pass gave it.

    dims: the dimensions of an input with a batch.
    """

    def __init__(self, module: nn.Module, dims: int) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", self.own)
        self.dims = dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.inner(*args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        if type(result) is not torch.Tensor or not isinstance(x, torch.Tensor):
            return result
        if x.dim() != self.dims:
            return result.contiguous()
        return kept(result, x)


def run(context: OptimizeContext) -> None:
    model = context.model
    is_free, reason = is_order_free(context), None
    if context.run is None:
        reason = context.why_no_run
    elif model in context.closed or not any(is_free):
        reason = "the model's code or its output depends on the order in memory"
    for module in context.open_modules():
        weight = module._parameters.get("weight")
        format_ = _FORMATS.get(type(module))
        if format_ is None or weight is None or not is_parameter(weight):
            continue
        if weight.is_contiguous(memory_format=format_):
            continue
        if reason is not None:
            context.skipped("channels_last", module, f"{type(module).__name__}: {reason}")
            continue
        values = weight.detach().contiguous(memory_format=format_)
        converted = nn.Parameter(values, weight.requires_grad)
        context.set_parameter(module, "weight", converted)
        context.log.set_forward(module, OrderedForward(module, weight.dim()))
        context.applied("channels_last", module, f"{type(module).__name__} weight")
    is_done = any(isinstance(m.__dict__.get("forward"), OrderedForward) for m in context.paths)
    if is_done and not isinstance(model.__dict__.get("forward"), (ModelForward, OrderedForward)):
        context.log.set_forward(model, ModelForward(model, *is_free))
