"""Pass `channels_last`: the weights of convolutions that `pack` leaves, in channels-last order.

With a weight in that order torch computes the convolution, and what follows it, channels-last.
"""

from __future__ import annotations

import torch
from torch import nn

from ..context import Context

_FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


def run(context: Context) -> None:
    for module in context.open_modules():
        weight = module._parameters.get("weight")
        format_ = _FORMATS.get(type(module))
        if format_ is None or weight is None or type(weight) is not nn.Parameter:
            continue
        if weight.is_contiguous(memory_format=format_):
            continue
        values = weight.detach().contiguous(memory_format=format_)
        converted = nn.Parameter(values, weight.requires_grad)
        context.set_parameter(module, "weight", converted)
        context.did("channels_last", module, f"{type(module).__name__} weight")
