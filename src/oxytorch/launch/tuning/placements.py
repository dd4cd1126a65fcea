"""What a search tries: a function of the topology, of the libraries and of what was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..plan import PlanError, Request, make_plan
from ..topology import Topology

SINGLES = 3
"""Parts of the machine on which one instance alone is tried too: a NUMA node, its half, a
quarter."""
ALL_THREADS = -1
"""Of `Axes.threads`: every thread of a core, where cores have several."""
PER_CORE = 0
"""Of `Axes.threads`: one thread for each core."""


@dataclass(frozen=True)
class Placement:
    """One way to start a script.

    ncores: processors of each instance; threads: of each of them, PER_CORE for as many as it has.
    has_all_threads: whether processors are all threads of a core, or one of each.
    is_within_node: whether no instance spans NUMA nodes.
    """

    ninstances: int
    ncores: int
    threads: int = PER_CORE
    has_all_threads: bool = False
    is_within_node: bool = False
    allocator: str = "default"
    openmp: str = "default"

    def words(self) -> list[str]:
        """The options of `oxytorch run` that place a script so."""
        words = [f"--ninstances={self.ninstances}", f"--ncores-per-instance={self.ncores}"]
        words += [f"--nthreads-per-instance={self.threads}"] if self.threads else []
        words += ["--use-logical-cores"] if self.has_all_threads else []
        words += ["--skip-cross-node-cores"] if self.is_within_node else []
        return [
            *words,
            f"--memory-allocator={self.allocator}",
            f"--omp-runtime={self.openmp}",
        ]

    def __str__(self) -> str:
        what = "thread" if self.has_all_threads else "core"
        text = f"{self.ninstances} x {self.ncores} {what}{'s' * (self.ncores != 1)}"
        text += f", {self.threads} OpenMP thread{'s' * (self.threads != 1)}" if self.threads else ""
        text += f", {self.allocator}" if self.allocator != "default" else ""
        return text + (", Intel's OpenMP" if self.openmp == "intel" else "")

    def complexity(self) -> tuple[int, int, int]:
        """What a simpler placement has less of: changes to what torch has by itself, instances,
        and cores that are left unused."""
        changes = (self.threads != PER_CORE) + self.has_all_threads
        changes += (self.allocator != "default") + (self.openmp != "default")
        return changes, self.ninstances, -self.ncores

    def data(self) -> dict[str, Any]:
        """As JSON has it; `Placement(**data)` is the same one."""
        return asdict(self)


@dataclass(frozen=True)
class Axes:
    """The values that are tried; an empty tuple leaves the choice to us.

    allocators, openmps, threads: the first is the base; the others replace it one at a time, or,
    with `is_full`, in all combinations.
    """

    ninstances: tuple[int, ...] = ()
    ncores: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    allocators: tuple[str, ...] = ("default",)
    openmps: tuple[str, ...] = ("default",)
    is_full: bool = False


def placements(topology: Topology, request: Request, axes: Axes) -> list[Placement]:
    """All that is tried, the simplest first: one instance on all cores, if nothing else was asked.

    request: which cores may be used. Raises PlanError where nothing of it fits.
    """
    nodes = _nodes(topology, request)
    every = _nodes(topology, replace(request, use_logical_cores=True))
    threads = axes.threads or _threads(nodes, every, request)
    settings = _settings(axes, threads)
    found: dict[Placement, None] = {}
    for count, ncores in _shapes(nodes, axes):
        is_asked = bool(axes.ninstances or axes.ncores)
        is_part = count == 1 and ncores < sum(nodes) and not is_asked
        for number, (thread, allocator, openmp) in enumerate(settings):
            if is_part and number:
                continue  # a part of the machine is tried with the base alone
            each = Placement(
                count,
                ncores,
                threads=max(thread, 0),
                is_within_node=len(nodes) > 1 and _fits_within(nodes, count, ncores),
                allocator=allocator,
                openmp=openmp,
            )
            if thread == ALL_THREADS:
                more = ncores * sum(every) // sum(nodes)
                if more == ncores:
                    continue
                each = replace(
                    each,
                    ncores=more,
                    has_all_threads=True,
                    is_within_node=len(every) > 1 and _fits_within(every, count, more),
                )
            elif thread > ncores and not axes.threads:
                continue
            found[each] = None
    if not found:
        raise PlanError(
            f"--ninstances, --ncores-per-instance: none of the combinations fit, with "
            f"{sum(nodes)} cores to use"
        )
    return sorted(found, key=Placement.complexity)


def _nodes(topology: Topology, request: Request) -> list[int]:
    """How many processors each NUMA node has to give."""
    plan = make_plan(topology, replace(request, mode="throughput"))
    return [len(one.cpus) for one in plan.instances]


def _threads(nodes: Sequence[int], every: Sequence[int], request: Request) -> tuple[int, ...]:
    is_free = request.cores is None and not request.use_logical_cores
    return (PER_CORE, ALL_THREADS) if is_free and sum(every) > sum(nodes) else (PER_CORE,)


def _shapes(nodes: Sequence[int], axes: Axes) -> list[tuple[int, int]]:
    """Instances and the cores of each."""
    total = sum(nodes)
    if axes.ninstances and axes.ncores:
        pairs = itertools.product(axes.ninstances, axes.ncores)
        return [(count, each) for count, each in pairs if count * each <= total]
    if axes.ninstances:
        return [(count, total // count) for count in axes.ninstances if count <= total]
    if axes.ncores:
        return [(total // each, each) for each in axes.ncores if each <= total]
    sizes, size = [], max(nodes)
    while size:
        sizes.append(size)
        size //= 2
    found = {(1, total), *((1, size) for size in sizes[: SINGLES + (total == max(nodes))])}
    found |= {(sum(node // size for node in nodes), size) for size in sizes}
    size = 2 * max(nodes)
    while size < total:  # of several nodes: a socket, for one
        found.add((total // size, size))
        size *= 2
    return sorted(found, key=lambda shape: (shape[0], -shape[1]))


def _settings(axes: Axes, threads: Sequence[int]) -> list[tuple[int, str, str]]:
    """Threads, allocator and OpenMP runtime: the base, then what differs from it."""
    if axes.is_full:
        return [*itertools.product(threads, axes.allocators, axes.openmps)]
    base = threads[0], axes.allocators[0], axes.openmps[0]
    return [
        base,
        *((thread, *base[1:]) for thread in threads[1:]),
        *((base[0], allocator, base[2]) for allocator in axes.allocators[1:]),
        *((*base[:2], openmp) for openmp in axes.openmps[1:]),
    ]


def _fits_within(nodes: Sequence[int], count: int, ncores: int) -> bool:
    return sum(node // ncores for node in nodes) >= count
