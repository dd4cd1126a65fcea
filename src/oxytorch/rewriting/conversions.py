"""Conversions of modules whose parameters are packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.packed import PackedTensor


class ApplyToPacked:
    """`Module._apply` (behind `to`, `cpu`, `float`, `share_memory`) of a module with packed
    parameters, which stay the very objects where they are not converted.

    torch puts other contents into them at each call, so that a model which is sent to its device
    before each use would be looked at anew, and packed again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module, torchs = self.module, type(self.module)._apply
        packed: list[Any] = [p for p in module._parameters.values() if isinstance(p, PackedTensor)]
        with torch.no_grad():
            made = {id(p): function(p) for p in packed}

        def once(given: Tensor) -> Tensor:
            found = made.pop(id(given), None)
            return function(given) if found is None else found

        stays = all(made[id(p)] is p and p.grad is None for p in packed)
        if not stays or torchs not in (nn.Module._apply, nn.RNNBase._apply):
            torchs(module, once, recurse)  # type: ignore[no-untyped-call]
            return module
        others = nn.Module.__new__(type(module))
        rest = {n: p for n, p in module._parameters.items() if not isinstance(p, PackedTensor)}
        before = [*rest.values()]
        others.__dict__.update(module.__dict__, _parameters=rest)
        torchs(others, function, recurse)  # type: ignore[no-untyped-call]
        module._parameters.update(rest)
        is_replaced = any(now is not own for now, own in zip(rest.values(), before, strict=True))
        if is_replaced and isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        return module
