"""Optimizers of torch, and of packages for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.optim.cases import LEARNING_RATE, OPTIMIZERS

_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
_ARGUMENTS = {"AdamW": _ADAMW, "Adam": {**_ADAMW, "weight_decay": 0.0}}
"""Arguments that packages have other defaults for than torch; else those of `OPTIMIZERS`."""


def stock_class(optimizer: str) -> type[Optimizer]:
    """torch's class of that name."""
    found: type[Optimizer] | None = getattr(torch.optim, optimizer, None)
    if found is None:
        raise Absent(f"torch has no {optimizer}")
    return found


def stock(optimizer: str, parameters: Sequence[Tensor], **how: bool) -> Optimizer:
    """torch's optimizer of that name, in the way that `how` names."""
    make: Any = stock_class(optimizer)
    try:
        made: Optimizer = make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer], **how)
    except (TypeError, RuntimeError) as error:
        raise Absent(f"torch's {optimizer} does not take {', '.join(how)}=True") from error
    return made


PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "optimi": {"AdamW": ("float32", "bfloat16"), "SGD": ("float32",), "Lion": ("float32",)},
    "bitsandbytes": {
        "AdamW": ("float32", "float32+int8"),
        "SGD": ("float32",),
        "Lion": ("float32", "float32+int8"),
    },
    "flashoptim": dict.fromkeys(("AdamW", "SGD", "Lion"), ("split+int8",)),
}
"""Package -> its optimizers -> the formats in which it has them."""


def packaged(package: str, optimizer: str, kept: str, parameters: Sequence[Tensor]) -> Optimizer:
    """A package's optimizer of that name in one of its formats."""
    arguments = {**OPTIMIZERS[optimizer], **_ARGUMENTS.get(optimizer, {})}
    how: dict[str, dict[str, Any]] = {
        "optimi": {"triton": True, "kahan_sum": False},
        "bitsandbytes": {"optim_bits": 8 if kept.endswith("int8") else 32},
        # Of its formats the one that comes closest to split+int8.
        "flashoptim": {"quantize": True, "master_weight_bits": 24},
    }
    on_index = "torch-optimi" if package == "optimi" else package
    module = require(
        "bitsandbytes.optim" if package == "bitsandbytes" else package, f"pip install {on_index}"
    )
    name = f"Flash{optimizer}" if package == "flashoptim" else optimizer
    made: Optimizer = getattr(module, name)(
        [*parameters], lr=LEARNING_RATE, **arguments, **how[package]
    )
    return made
