"""How a plain tensor among the sources of a derived value is compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .watched import PLAIN

SMALL = 64 << 10
"""Bytes up to which a plain tensor is compared by its values, which sees every write. A larger one
is compared by its address and version: `.data` and NumPy write past the version."""


def is_watchable(tensor: Tensor) -> bool:
    """Whether a tensor has an address and counts the writes to it."""
    return has_form(tensor) and tensor.device.type == "cpu" and not tensor.is_inference()


def has_form(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without holes, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_small(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and type(tensor) in PLAIN
        and tensor.is_contiguous()
        and tensor.nbytes <= SMALL
    )


def same_bits(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape or now.dtype != then.dtype:
        return False
    return torch.equal(now.detach().view(torch.uint8), then.view(torch.uint8))
