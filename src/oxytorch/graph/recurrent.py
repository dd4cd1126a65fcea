"""What stands in for the forward of a recurrent layer of torch has in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from ..core.packed import PackedTensor
from .forward import Forward, with_parameters
from .recognize import holds_its_parameters


def with_weights(module: nn.RNNBase, parameters: dict[str, Any]) -> Any:
    """A recurrent layer like another, but for its parameters."""
    made = with_parameters(module, parameters)
    made.__dict__["_flat_weights"] = [parameters[name] for name in made._flat_weights_names]
    return made


def input_and_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The input and the state of a call, or None where it has other arguments."""
    given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    if len(args) > 2 or "input" not in given or not {*given} <= {"input", "hx"}:
        return None
    return given["input"], given.get("hx")


def states_fit(module: nn.RNNBase, x: torch.Tensor, states: tuple[torch.Tensor, ...]) -> bool:
    """Whether states (two of an LSTM) have the shape that goes with x; kernels do not look."""
    if not states:
        return True
    batch = [x.shape[0 if module.batch_first else 1]] if x.dim() == 3 else []
    layers = module.num_layers * (2 if module.bidirectional else 1)
    wanted = (layers, *batch, module.hidden_size)
    count = 2 if isinstance(module, nn.LSTM) else 1
    return len(states) == count and all(tuple(s.shape) == wanted for s in states)


class RecurrentForward(Forward):
    """The forward of a recurrent layer some of whose weights are packed."""

    def _home(self) -> nn.Module:
        # For weights of a class of their own torch computes in another way, which takes longer and
        # under autocast gives other dtypes.
        module: Any = self.module
        is_traced = torch._C._get_tracing_state() is not None
        if (
            torch.is_grad_enabled()
            or is_traced
            or is_compiling()
            or not holds_its_parameters(module, module._flat_weights_names)
        ):
            return self.module
        plain = {
            name: p.values() if isinstance(p, PackedTensor) else p
            for name, p in module._parameters.items()
        }
        return with_weights(module, plain)  # type: ignore[no-any-return]
