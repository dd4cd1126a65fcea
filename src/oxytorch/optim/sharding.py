"""Sharded tensors (DTensor): the part that this process holds, and sums over all parts.

Kernels update shards; each process holds its own. A process may hold an empty shard, and several
processes copies of the same one, which their steps keep equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STREAM_SHIFT = 32
"""The number of a shard stands above these bits of a random stream's number."""


PLAIN: set[type] = {Tensor, torch.nn.Parameter}
"""Types of tensors that are never sharded."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, one of a single process included."""
    if type(tensor) in PLAIN:
        return False
    # Who has not imported the module has none, and importing it takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's shard, which shares memory with the tensor; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        # What a collective has not finished yet.
        return shard.wait() if hasattr(shard, "wait") else shard


def peek(tensor: Tensor) -> Tensor:
    """The memory of this process's shard, to look at; a plain tensor itself."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def placements(tensor: Tensor) -> object:
    """How a tensor is sharded; None of a plain one."""
    return getattr(tensor, "placements", None)


def placed_like(like: Tensor, shard: Tensor) -> Tensor:
    """`shard` as this process's part of a tensor that is sharded like `like`, if that is."""
    if not is_sharded(like):
        return shard
    whole: Any = like
    with torch.no_grad():
        placed: Tensor = type(whole).from_local(
            shard,
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return placed


def shard_like(like: Tensor, value: Tensor, name: str) -> Tensor:
    """`value`, of the whole shape of `like`, sharded as `like` is; this process's part shared.

    A plain value counts as the same in all processes. name: of the value, for errors.
    """
    if not is_sharded(like):
        if is_sharded(value):
            raise TypeError(
                f"{name}: expected a plain tensor, as the parameter is, got a DTensor; "
                "value.full_tensor() makes one"
            )
        return value
    whole: Any = like
    with torch.no_grad():
        if is_sharded(value):
            moved: Tensor = value.redistribute(  # type: ignore[attr-defined]
                whole.device_mesh, whole.placements
            )
            return moved
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, whole.device_mesh, whole.placements, src_data_rank=None)


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This process's part of the gradient of a sharded parameter."""
    if not is_sharded(gradient):
        raise TypeError(
            f"expected the gradient of a DTensor to be a DTensor, got a {type(gradient).__name__}"
        )
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"expected a parameter that is sharded or replicated, got placements {placements}"
        )
    return local(shard_like(parameter, gradient, "gradient"))


def shard_number(parameter: Tensor) -> int:
    """The number of this process's shard; processes with copies of one shard share its number."""
    if not is_sharded(parameter):
        return 0
    whole: Any = parameter
    mesh, number = whole.device_mesh, 0
    for dim, placement in enumerate(whole.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number


def add_shards_(values: Tensor, like: Sequence[Tensor]) -> None:
    """Turns, in place, sums over shards into sums over whole tensors.

    values: float32 or float64 [len(like), ...], row i computed from this process's shard of
    `like[i]`. Rows of plain and of copied tensors stay as they are. One collective for each mesh
    dimension that anything is sharded over, for all tensors together; every process of the mesh has
    to call it with the same tensors.
    """
    groups: dict[str, tuple[Any, list[int]]] = {}
    for row, tensor in enumerate(like):
        if is_sharded(tensor):
            whole: Any = tensor
            for dim, placement in enumerate(whole.placements):
                if not placement.is_replicate() and whole.device_mesh.size(dim) > 1:
                    group = whole.device_mesh.get_group(dim)
                    groups.setdefault(group.group_name, (group, []))[1].append(row)
    for group, rows in groups.values():
        if len(rows) == len(values):
            torch.distributed.all_reduce(values, group=group)
        else:
            chosen = torch.tensor(rows, device="cpu").to(values.device, non_blocking=True)
            part = values.index_select(0, chosen)
            torch.distributed.all_reduce(part, group=group)
            values.index_copy_(0, chosen, part)
