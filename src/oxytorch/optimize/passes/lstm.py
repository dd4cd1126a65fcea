"""Pass `lstm`: LSTM layers with packed weights; oneDNN would else reorder them at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...ops.linear import supports
from ...ops.lstm import PackedLstmWeight, lstm
from ..context import Context
from .pack import _keep_plain_state


def refusal(context: Context, module: nn.LSTM) -> str | None:
    """Return why an LSTM's weights cannot be packed, or None if they can."""
    if module.proj_size:
        return "LSTM with projections"
    for name, parameter in module._parameters.items():
        if type(parameter) is not nn.Parameter:
            return f"LSTM: {name} is a {type(parameter).__name__}"
        if parameter.device.type != "cpu":
            return f"LSTM: {name} is on {parameter.device}"
        if len(context.owners.get(id(parameter), [])) > 1:
            return f"LSTM: {name} is shared with another module"
    weight = module._parameters["weight_ih_l0"]
    assert weight is not None
    return supports(context.target_dtype(module, weight))


def run(context: Context) -> None:
    for module in context.open_modules():
        if type(module) is not nn.LSTM:
            continue
        reason = refusal(context, module)
        if reason is not None:
            context.left("lstm", module, reason)
            continue
        for name in [*module._parameters]:
            parameter = module._parameters[name]
            assert parameter is not None
            dtype = context.target_dtype(module, parameter)
            values: torch.Tensor = parameter.detach().to(dtype)
            if name.startswith("weight"):
                kind = "input" if name.startswith("weight_ih") else "hidden"
                values = PackedLstmWeight(
                    values, kind=kind, reverse=name.endswith("_reverse"), has_bias=module.bias
                )
            if name.startswith("weight") or dtype != parameter.dtype:
                context.set_parameter(module, name, nn.Parameter(values, parameter.requires_grad))
        _keep_plain_state(context, module)
        context.set_forward(module, LstmForward(module))
        context.did("lstm", module, "LSTM with packed weights")


class LstmForward:
    """The forward of an LSTM with packed weights; torch's own in training or for gradients."""

    def __init__(self, module: nn.LSTM) -> None:
        self.module = module

    def __call__(self, x: Any, hx: Any = None) -> Any:
        module = self.module
        packed = isinstance(module._parameters["weight_ih_l0"], PackedLstmWeight)
        plain_input = isinstance(x, torch.Tensor) and x.numel() > 0
        if packed and plain_input and not module.training and not self._wants_gradient(x):
            return lstm(x, hx, module)
        return self._plain(x, hx)

    def _wants_gradient(self, x: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.module.parameters())
        )

    def _plain(self, x: Any, hx: Any) -> Any:
        """torch's own formula over the restored weights, which autograd records."""
        module = self.module
        weights = {
            name: p * 1 if isinstance(p, PackedLstmWeight) else p
            for name, p in module._parameters.items()
        }
        dtype = next(iter(weights.values())).dtype  # type: ignore[union-attr]
        stand_in = nn.LSTM(
            module.input_size,
            module.hidden_size,
            module.num_layers,
            module.bias,
            module.batch_first,
            module.dropout,
            module.bidirectional,
            device="meta",
            dtype=dtype,
        ).train(module.training)
        x = x.to(dtype)
        hx = None if hx is None else tuple(s.to(dtype) for s in hx)
        return torch.func.functional_call(stand_in, weights, (x, hx))  # type: ignore[arg-type]
