"""Steps of torch's fused optimizers, counted as the writes that they are.

Versions of tensors are how derived values notice writes (`core/sources.py`). Torch's operators for
fused steps write to the tensors of a list without raising theirs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .watched import PLAIN

COUNTS_ITS_WRITES = "counts_its_writes"
"""Attribute of optimizers that take `fused=True` and raise the versions themselves."""


@functools.cache
def count_fused_steps() -> None:
    """Have steps of optimizers made with `fused=True` raise the versions, from now on."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if getattr(optimizer, COUNTS_ITS_WRITES, False):
        return  # a compiled step counts the writes to its arguments
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([*filter(_is_written, group["params"])])


def _is_written(parameter: Tensor) -> bool:
    """Whether a step wrote to a parameter, and no class of its own has seen that."""
    is_plain = type(parameter) in PLAIN and not parameter.is_inference()
    return is_plain and parameter.grad is not None
