"""Storages: who else holds a tensor's, and tensors over memory of others with one of their own."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .no_modes import no_modes
from .watched import PLAIN


def bytes_over(address: int, count: int, release: Callable[..., Any], *given: Any) -> Tensor:
    """A uint8 tensor [count] over memory at an address, not zero bytes.

    release: called with `given` when no tensor uses the storage any more, but not when the process
    ends.
    """
    block = (ctypes.c_char * count).from_address(address)
    # The tensor's storage holds the block; both end together.
    weakref.finalize(block, release, *given).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def is_part(tensor: Tensor) -> bool:
    """Whether a plain CPU tensor is a view of a part of its storage."""
    is_plain = type(tensor) in PLAIN and tensor.layout == torch.strided
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
    flat = bytes_over(part.data_ptr(), count, _hold, part.detach())
    return flat.view(part.dtype).as_strided(part.shape, part.stride())


def _hold(part: Tensor) -> None:
    """What is to be released keeps its arguments alive until then."""


def is_aliased(tensor: Tensor) -> bool:
    """Whether another tensor, or somebody who asked for it, holds the memory of a dense tensor."""
    storage = tensor.untyped_storage()
    # One is the tensor's own, one that of the object just made.
    is_shared = torch._C._storage_Use_Count(storage._cdata) > 2
    return is_shared or sys.getrefcount(storage) > _references()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors, which count writes, are the same values."""
    if any(type(t) is not Tensor or t.is_inference() for t in (one, other)):
        return False
    own, theirs = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (one, other)
    )
    return own == theirs


@functools.cache
def _references() -> int:
    """How many references there are to the object of a storage that only one variable holds."""
    tensor = torch.zeros(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def usable_anywhere(values: Tensor) -> Tensor:
    """Values made in inference mode as a tensor over their memory that may be used outside too."""
    if type(values) is not Tensor or not values.is_inference():
        return values
    with torch.inference_mode(False), torch.no_grad(), no_modes():
        place = values.storage_offset(), values.size(), values.stride()
        empty = torch.empty(0, dtype=values.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), *place)
