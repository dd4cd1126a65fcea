"""Notices, before each step, that tensors whose addresses a plan keeps have moved."""

from __future__ import annotations

import ctypes
import enum
import functools
import weakref
from collections.abc import Sequence
from operator import attrgetter, or_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ... import _library
from ...core.words import keys_of, set_offsets
from .. import sharding
from ..batch import reads_as_stored
from ..master_weight import MasterWeight

_GRADIENT = attrgetter("grad")


class Moved(enum.IntEnum):
    """What a comparison found; the numbers are those of core/watch.cpp."""

    NOTHING = 0
    GRADIENTS = 1
    """Gradients lie elsewhere, and else are as they were."""
    OTHER = 2
    """Anything else: the tensors have to be looked at again."""


_ANSWERS = (Moved.NOTHING, Moved.GRADIENTS, Moved.OTHER)


class AddressGuard(Protocol):
    """Compares tensors with what they were when the guard was made.

    Holds the tensors but not their gradients.
    """

    def compare(self) -> Moved:
        """Whether anything moved; addresses of gradients are set to where they are now."""

    def bump_versions(self) -> None:
        """Notes for autograd that the parameters with gradients are written to."""


class Watched(NamedTuple):
    """What a guard compares.

    kept: tensors whose memory has to stay where it is.
    parameters: those whose gradients may lie elsewhere in each step.
    addresses: int64 [n, ...] on the CPU; the first number of row i is the address of the i-th
        gradient of those that there are.
    split: parameters with gradients whose master weights are kept, to notice a write to the upper
        half alone.
    """

    kept: list[Tensor]
    parameters: list[Tensor]
    addresses: Tensor
    split: Sequence[tuple[Tensor, MasterWeight]] = ()


def guard(
    kept: Sequence[Tensor],
    parameters: Sequence[Tensor],
    addresses: Tensor,
    master_weights: Sequence[MasterWeight | None] = (),
) -> AddressGuard:
    """Watches the memory of `kept` and the gradients of `parameters`; of sharded ones, the shards.

    A parameter without a gradient is watched for getting one.

    addresses: see `Watched`.
    master_weights: of each parameter, all of which have gradients.
    """
    may_swap = torch.__future__.get_swap_module_params_on_conversion()
    is_plain = not any(map(sharding.is_sharded, (*kept, *parameters)))
    pairs = zip(parameters, master_weights, strict=False)
    split = [(own, master) for own, master in pairs if master is not None]
    low_bits = [master.low_bits for _, master in split]
    watched = Watched([*kept, *low_bits], list(parameters), addresses, split)
    # Tensors that are held in two places cannot be swapped.
    if _functions() is not None and is_plain and not may_swap:
        return NativeGuard(watched)
    return PythonGuard(watched)


class NativeGuard:
    """core/watch.cpp: a few nanoseconds for each tensor."""

    def __init__(self, watched: Watched) -> None:
        functions = _functions()
        assert functions is not None
        self._address = torch.ops.oxytorch.watch(
            watched.kept,
            watched.parameters,
            [own for own, _ in watched.split],
            [master.low_bits for _, master in watched.split],
        )
        self._table = addresses = watched.addresses
        stride = addresses.stride(0) if len(addresses) else 0
        self._arguments = (self._address, addresses.data_ptr(), stride)
        self._moved = functions.oxytorch_moved
        self._bump_versions = functions.oxytorch_bump_versions
        weakref.finalize(self, functions.oxytorch_unwatch, self._address)

    def compare(self) -> Moved:
        return _ANSWERS[self._moved(*self._arguments)]

    def bump_versions(self) -> None:
        self._bump_versions(self._address)


class PythonGuard:
    """The same for shards, without the library, or where a torch lacks what that needs."""

    def __init__(self, watched: Watched) -> None:
        self._kept, self._parameters, self._table, split = watched
        self._masters = [master for _, master in split]
        updated = [own for own in self._parameters if own.grad is not None]
        shards = [sharding.peek(own) for own in updated if sharding.is_sharded(own)]
        low_bits = (master.low_bits for master in self._masters)
        self._updated = [*updated, *shards, *low_bits]
        self._addresses = [*map(_place, self._kept)]
        self._layouts = [_layout(parameter.grad) for parameter in self._parameters]

    def compare(self) -> Moved:
        if [*map(_place, self._kept)] != self._addresses:
            return Moved.OTHER
        if any(master.is_written() for master in self._masters):
            return Moved.OTHER
        gradients = list(map(_GRADIENT, self._parameters))
        if list(map(_layout, gradients)) != self._layouts:
            return Moved.OTHER
        having = (gradient for gradient in gradients if gradient is not None)
        found = torch.tensor(
            [_place(gradient)[0] for gradient in having], dtype=torch.int64, device="cpu"
        )
        before = self._table[:, 0]
        if torch.equal(found, before):
            return Moved.NOTHING
        before.copy_(found)
        return Moved.GRADIENTS

    def bump_versions(self) -> None:
        torch.autograd.graph.increment_version(self._updated)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how many elements it has."""
    memory = sharding.peek(tensor)
    return memory.data_ptr(), memory.numel()


def _layout(gradient: Tensor | None) -> tuple[object, ...] | None:
    """What has to stay; None for no gradient."""
    if gradient is None or gradient.layout is not torch.strided:
        return None if gradient is None else (gradient.layout,)
    memory = sharding.peek(gradient)
    if not reads_as_stored(memory):
        return (object(),)  # which is like no other
    kind = (gradient.dtype, gradient.device, sharding.placements(gradient))
    return (*kind, memory.stride(), memory.numel())


@functools.cache
def _functions() -> ctypes.PyDLL | None:
    """The library's plain C functions, if they can reach gradients."""
    library = _library.functions_in_known_torch()
    if library is None:
        return None
    set_offsets(library)
    plain, complex_numbers = (
        torch.zeros(1, device="cpu"),
        torch.zeros(1, dtype=torch.complex64, device="cpu"),
    )
    turned = torch._neg_view(plain), complex_numbers.conj(), torch._efficientzerotensor(1)
    keys = functools.reduce(or_, map(keys_of, turned)) & ~keys_of(plain)
    library.oxytorch_learn_turned(ctypes.c_uint64(keys))
    return library if library.oxytorch_can_watch() else None
