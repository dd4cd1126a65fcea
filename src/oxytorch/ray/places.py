"""Which cores of a machine a process takes: shares by the planner of `oxytorch run`."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..core.system_files import ranges
from ..launch.plan import Instance, PlanError, Request, make_plan
from ..launch.topology import read_topology
from ..serve.logs import log


@dataclass(frozen=True)
class NodePlan:
    """What one machine of the cluster has room for.

    node: Ray's id.
    address: of the machine.
    cpus: what Ray counts there.
    shares: the cores of each replica, by Linux's numbers.
    """

    node: str
    address: str
    cpus: float
    shares: tuple[tuple[int, ...], ...]


def plan(cores: int | None = None) -> list[NodePlan]:
    """The shares of all machines of the cluster that this program is connected to.

    cores: of a share, which lies within one NUMA node; None makes one share of each NUMA node. A
    machine without room for one has none.
    """
    if cores is not None and cores < 1:
        raise ValueError(f"plan: expected cores of at least 1, got {cores}")
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    there = ray.remote(num_cpus=0)(_shares_there)
    asked = [
        there.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(cores)
        for node in nodes
    ]
    return [
        NodePlan(node["NodeID"], node["NodeManagerAddress"], node["Resources"]["CPU"], shares)
        for node, shares in zip(nodes, ray.get(asked), strict=True)
    ]


def cpus_of_a_share(nodes: Sequence[NodePlan]) -> float:
    """What a replica asks Ray for, so that no machine gets more of them than it has shares."""
    found = [node.cpus / len(node.shares) for node in nodes if node.shares]
    if not found:
        raise ValueError(
            "no machine of the cluster has room for a share of so many cores within a NUMA node; "
            "give fewer cores"
        )
    each = min(found)
    return float(int(each)) if each >= 1 else each


def _shares_there(cores: int | None) -> tuple[tuple[int, ...], ...]:
    return tuple(share.cpus for share in _shares(cores))


def _shares(cores: int | None) -> tuple[Instance, ...]:
    if cores is None:
        return make_plan(read_topology(), Request(mode="throughput")).instances
    request = Request(ncores_per_instance=cores, one_node=True)
    try:
        return make_plan(read_topology(), request).instances
    except PlanError:  # this machine is too small
        return ()


def take_place(cores: int | None) -> tuple[int, ...]:
    """Binds this thread, and those that it starts, to a share of cores that no process has taken.

    It is taken until the process ends, however it ends. Where none is free, as with several nodes
    of Ray on one machine, nothing is bound, and there are as many threads as Ray has granted CPUs.
    """
    for share in _shares(cores):
        if _taken(share.cpus):
            os.sched_setaffinity(0, share.cpus)
            torch.set_num_threads(len(share.cpus))
            log.info("bound", extra={"fields": {"cores": ranges(share.cpus)}})
            return share.cpus
    granted = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    threads = max(1, int(granted))
    torch.set_num_threads(threads)
    log.warning("no share of cores is free: not bound", extra={"fields": {"threads": threads}})
    return ()


_LOCKS: list[int] = []
"""Open files whose locks say which cores this process has taken."""


def _taken(cpus: Sequence[int]) -> bool:
    folder = Path(tempfile.gettempdir()) / f"oxytorch-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it, or set TMPDIR")
    mine: list[int] = []
    for number in sorted(cpus):
        file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        mine.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has it
            for each in mine:
                os.close(each)
            return False
    _LOCKS.extend(mine)
    return True
