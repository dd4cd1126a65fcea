"""Tensors over a part of another's memory that have a storage of their own."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor


def is_part(tensor: Tensor) -> bool:
    """Whether a plain CPU tensor is a view of a part of its storage."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def with_own_storage(part: Tensor) -> Tensor:
    """The same values in the same memory, which writes to either reach.

    Formats such as safetensors take tensors that share a storage for one and the same weight, and
    refuse or leave out all but one of them.
    """
    lengths = [(size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)]
    count = (1 + sum(lengths)) * part.element_size()
    block = (ctypes.c_char * count).from_address(part.data_ptr())
    # The new storage holds the block, and the block the memory.
    weakref.finalize(block, _nothing, part.detach()).atexit = False
    flat = torch.frombuffer(block, dtype=part.dtype)
    return flat.as_strided(part.shape, part.stride())


def _nothing(held: Tensor) -> None:
    pass
