"""Sets of cores, and the cores of a NUMA node."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..core.system_files import numbers, ranges, text_of

_NODES = Path("/sys/devices/system/node")


class CPUPool:
    """Cores to run on. It is a description alone: making one pins nothing.

    Cores are numbered as the system numbers its logical processors. Without an argument the pool
    has all cores that the calling thread may use (`os.sched_getaffinity(0)`), so that limits set
    by taskset, numactl and cpusets hold.

    Args:
        core_ids: the cores, in the order in which streams share them.
        node_id: a NUMA node, of whose cores those that the calling thread may use are taken.

    Raises:
        ValueError: both arguments; no core, a core twice, or one that this thread may not use; a
            node that does not exist.
        TypeError: numbers that are no integers.
    """

    __slots__ = ("core_ids",)

    core_ids: tuple[int, ...]

    def __init__(self, core_ids: Iterable[int] | None = None, node_id: int | None = None) -> None:
        if core_ids is not None and node_id is not None:
            raise ValueError("CPUPool: expected core_ids or node_id, got both; leave one out")
        if core_ids is not None:
            self.core_ids = _checked(core_ids)
        elif node_id is not None:
            self.core_ids = _of_node(node_id)
        else:
            self.core_ids = tuple(usable_cores())

    def __len__(self) -> int:
        return len(self.core_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CPUPool) and self.core_ids == other.core_ids

    def __hash__(self) -> int:
        return hash(self.core_ids)

    def __repr__(self) -> str:
        return f"CPUPool(core_ids={list(self.core_ids)})"


def get_core_list_of_node_id(node_id: int) -> list[int]:
    """All cores of a NUMA node, logical ones included, as the system lists them.

    Raises:
        ValueError: there is no such node.
    """
    node_id = _integer(node_id, "node_id")
    path = _NODES / f"node{node_id}" / "cpulist"
    if path.exists():
        return numbers(text_of(path))
    nodes = sorted(int(folder.name[4:]) for folder in _NODES.glob("node[0-9]*"))
    if not nodes and node_id == 0:  # a system without NUMA
        return list(range(os.cpu_count() or 1))
    raise ValueError(f"node_id: expected one of {nodes or [0]}, got {node_id}")


def usable_cores() -> list[int]:
    """The cores that the calling thread may use."""
    if not hasattr(os, "sched_getaffinity"):
        raise RuntimeError("oxytorch.runtime: this system cannot pin threads; it needs Linux")
    return sorted(os.sched_getaffinity(0))


def shares(cores: Sequence[int], streams: int) -> list[tuple[int, ...]]:
    """The cores of each stream, in order; the first streams have one more if some are left."""
    each = iter(cores)
    return [tuple(next(each) for _ in range(size)) for size in even_sizes(len(cores), streams)]


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` as a sum of `parts` numbers that differ by one at most, the larger ones first."""
    size, more = divmod(total, parts)
    return [size + 1] * more + [size] * (parts - more)


def _checked(core_ids: Iterable[int]) -> tuple[int, ...]:
    cores = tuple(_integer(core, "core_ids") for core in core_ids)
    usable = usable_cores()
    if not cores:
        raise ValueError("CPUPool: core_ids: expected one core or more, got none")
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        raise ValueError(f"CPUPool: core_ids: expected each core once, got {twice} more than once")
    others = sorted(set(cores).difference(usable))
    if others:
        raise ValueError(
            f"CPUPool: core_ids: expected cores that this thread may use ({ranges(usable)}), "
            f"got {others}; see os.sched_getaffinity(0)"
        )
    return cores


def _of_node(node_id: int) -> tuple[int, ...]:
    usable = usable_cores()
    cores = tuple(core for core in get_core_list_of_node_id(node_id) if core in usable)
    if not cores:
        raise ValueError(
            f"CPUPool: node_id: expected a node with cores that this thread may use "
            f"({ranges(usable)}), got {node_id}; see os.sched_getaffinity(0)"
        )
    return cores


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {value!r}") from None
