"""Which instance runs on which cores: a function of the topology and of what was asked for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.system_files import ranges
from .topology import Cpu, Topology

CORES_FOR_LATENCY = 4
"""Cores of an instance with --latency-mode."""
SPREAD = -1
"""--ncores-per-instance: use all cores, so that some instances have one more than others."""


class PlanError(ValueError):
    """What was asked for does not fit the machine; the text names the option."""


@dataclass(frozen=True)
class Request:
    """The options of `oxytorch run` that decide about cores; 0 and None leave the choice to us.

    mode: "throughput" (an instance for each NUMA node), "latency" (one for every four cores) or "".
    one_node: every instance lies within one NUMA node.
    bind_memory: an instance's memory comes from its own NUMA nodes alone.
    option: what the number of instances is called where it was asked for.
    """

    ninstances: int = 0
    ncores_per_instance: int = 0
    nodes: tuple[int, ...] | None = None
    cores: tuple[int, ...] | None = None
    use_logical_cores: bool = False
    use_e_cores: bool = False
    mode: str = ""
    strategy: str = "scatter"
    one_node: bool = False
    bind_memory: bool = False
    instance_idx: int | None = None
    option: str = "--ninstances"


@dataclass(frozen=True)
class Instance:
    """The processors of one instance, the NUMA nodes they belong to, and those of its memory.

    memory_nodes: empty where the kernel chooses, which takes the nearest node that has room.
    """

    index: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All instances that run, and what the user should know about the choice."""

    instances: tuple[Instance, ...]
    notes: tuple[str, ...] = ()


def make_plan(topology: Topology, request: Request) -> Plan:
    """Assign processors to instances; raises PlanError for what does not fit."""
    notes: list[str] = []
    cpus = _chosen(topology, request, notes)
    try:
        sizes = _sizes(cpus, request, notes)
    except PlanError as error:
        raise PlanError("; ".join((str(error) + _more_cores(topology, request), *notes))) from None
    if request.mode == "throughput":
        parts = list(_by_node(cpus).values())
    elif request.one_node:
        parts = _within_nodes(cpus, sizes, request)
    elif request.strategy == "scatter":
        parts = _scattered(cpus, sizes)
    else:
        parts = _in_order(cpus, sizes)
    parts.sort(key=lambda part: [_order(cpu) for cpu in part])
    instances = [
        Instance(
            index=index,
            cpus=tuple(sorted(cpu.number for cpu in part)),
            nodes=(nodes := tuple(sorted({cpu.node for cpu in part}))),
            memory_nodes=_memory_nodes(topology, nodes) if request.bind_memory else (),
        )
        for index, part in enumerate(parts)
    ]
    used = {number for instance in instances for number in instance.cpus}
    if rest := [cpu.number for cpu in cpus if cpu.number not in used]:
        notes.append(f"{_cores(len(rest))} unused: {ranges(rest)}")
    whole = len(instances) == 1 and not rest
    if not whole and (across := [one.index for one in instances if len(one.nodes) > 1]):
        notes.append(
            f"instance {ranges(across)} spans NUMA nodes; --skip-cross-node-cores avoids that"
        )
    if request.instance_idx is not None:
        if not 0 <= request.instance_idx < len(instances):
            raise PlanError(
                f"--instance-idx: expected a number below {len(instances)}, which is how many "
                f"instances there are, got {request.instance_idx}"
            )
        instances = [instances[request.instance_idx]]
    return Plan(tuple(instances), tuple(notes))


def _chosen(topology: Topology, request: Request, notes: list[str]) -> list[Cpu]:
    """The processors to share out, ordered so that neighbours are close to each other."""
    usable = sorted(topology.usable(), key=_order)
    if request.cores is not None:
        return _listed(topology, request.cores, notes)
    if request.nodes is not None:
        existing = {cpu.node for cpu in topology.cpus}
        for node in request.nodes:
            if node not in existing:
                raise PlanError(
                    f"--nodes-list: expected NUMA nodes of this machine ({ranges(existing)}), "
                    f"got {node}"
                )
            if node not in {cpu.node for cpu in usable}:
                raise PlanError(
                    f"--nodes-list: this process may use no core of NUMA node {node}, only cores "
                    f"{ranges(topology.allowed)} (its cpuset or affinity)"
                )
        usable = [cpu for cpu in usable if cpu.node in request.nodes]
    fast = [cpu for cpu in usable if not cpu.is_efficient]
    if not request.use_e_cores and len(fast) < len(usable):
        if fast:
            rest = ranges(cpu.number for cpu in usable if cpu.is_efficient)
            notes.append(f"efficiency cores unused: {rest}; --use-e-cores adds them")
            usable = fast
        else:
            notes.append("there are efficiency cores only")
    if not request.use_logical_cores:
        first: dict[int, Cpu] = {}  # a container may have but the second thread of a core
        for cpu in usable:
            first.setdefault(cpu.core, cpu)
        usable = list(first.values())
    return _within_quota(topology, usable, notes)


def _listed(topology: Topology, cores: Sequence[int], notes: list[str]) -> list[Cpu]:
    """The processors of --cores-list."""
    known = {cpu.number: cpu for cpu in topology.cpus}
    for number in cores:
        if number not in known:
            raise PlanError(
                f"--cores-list: expected cores of this machine ({ranges(known)}), got {number}"
            )
        if number not in topology.allowed:
            raise PlanError(
                f"--cores-list: core {number} is not among those that this process may use, "
                f"{ranges(topology.allowed)} (its cpuset or affinity)"
            )
    if len(set(cores)) < len(cores):
        twice = next(number for number in cores if cores.count(number) > 1)
        raise PlanError(f"--cores-list: expected each core once, got {twice} twice")
    if topology.quota is not None and len(cores) > topology.quota:
        notes.append(
            f"the container grants {topology.quota:g} cores' worth of time: {len(cores)} threads "
            "will be held up by it"
        )
    return sorted((known[number] for number in cores), key=_order)


def _within_quota(topology: Topology, cpus: list[Cpu], notes: list[str]) -> list[Cpu]:
    """As many processors as the quota keeps busy: a thread more would wait, and the others for
    it."""
    granted = len(cpus) if topology.quota is None else max(1, math.floor(topology.quota))
    if granted >= len(cpus):
        return cpus
    notes.append(
        f"the container grants {topology.quota:g} cores' worth of time, so {granted} of "
        f"{len(cpus)} cores used; --cores-list takes any"
    )
    return cpus[:granted]


def _sizes(cpus: list[Cpu], request: Request, notes: list[str]) -> list[int]:
    """How many processors each instance gets."""
    total, count, each = len(cpus), request.ninstances, request.ncores_per_instance
    per_node = [len(part) for part in _by_node(cpus).values()]
    if request.mode == "throughput":
        return per_node
    if request.mode == "latency":
        each = CORES_FOR_LATENCY
        if total < each:
            notes.append(f"--latency-mode: there are only {_cores(total)}, so one instance")
            return [total]
    if count == 0 and each <= 0:
        count = len(per_node) if request.one_node else 1
    if each > 0:
        fitting = sum(size // each for size in per_node) if request.one_node else total // each
        if fitting < max(count, 1):
            where = " within NUMA nodes" if request.one_node else ""
            raise PlanError(
                f"--ncores-per-instance: {max(count, 1)} x {each} cores do not fit{where}, with "
                f"{_cores(total)} to use ({ranges(cpu.number for cpu in cpus)})"
            )
        return [each] * (count or fitting)
    if count > total:
        raise PlanError(
            f"{request.option}: expected at most {total}, with {_cores(total)} to use "
            f"({ranges(cpu.number for cpu in cpus)}), got {count}"
        )
    if each == SPREAD:
        return [total // count + (index < total % count) for index in range(count)]
    return [total // count] * count


def _within_nodes(cpus: list[Cpu], sizes: list[int], request: Request) -> list[list[Cpu]]:
    """Instances that each lie within a NUMA node; where their size is ours to choose, it is the
    largest of which so many fit."""
    nodes, count = list(_by_node(cpus).values()), len(sizes)
    each = max(sizes)
    while sum(len(node) // each for node in nodes) < count:
        each -= 1
    shares = [0] * len(nodes)
    for _ in range(count):
        fitting = [i for i, node in enumerate(nodes) if (shares[i] + 1) * each <= len(node)]
        if request.strategy == "scatter":
            fitting.sort(key=lambda i: shares[i])
        shares[fitting[0]] += 1
    parts = []
    for node, share in zip(nodes, shares, strict=True):
        size, more = each, 0
        if share and request.ncores_per_instance == SPREAD:
            size, more = divmod(len(node), share)
        parts += _in_order(node, [size + (index < more) for index in range(share)])
    return parts


def _scattered(cpus: list[Cpu], sizes: list[int]) -> list[list[Cpu]]:
    """Instances spread evenly over NUMA nodes; one that no node has room for spans several."""
    free = _by_node(cpus)
    placed = dict.fromkeys(free, 0)
    parts = []
    for position, size in enumerate(sizes):
        fitting = [node for node in free if len(free[node]) >= size]
        if fitting:
            node = min(fitting, key=lambda node: placed[node])
            part, free[node] = free[node][:size], free[node][size:]
            placed[node] += 1
            parts.append(part)
        else:
            rest = [cpu for node in free.values() for cpu in node]
            return parts + _in_order(rest, sizes[position:])
    return parts


def _in_order(cpus: list[Cpu], sizes: list[int]) -> list[list[Cpu]]:
    """One instance after the other, each on the next processors."""
    parts, begin = [], 0
    for size in sizes:
        parts.append(cpus[begin : begin + size])
        begin += size
    return parts


def _memory_nodes(topology: Topology, nodes: tuple[int, ...]) -> tuple[int, ...]:
    found = tuple(node for node in nodes if node in topology.memory_nodes)
    if not found:
        raise PlanError(
            f"--bind-numa-node: this process may allocate no memory on NUMA node {ranges(nodes)}, "
            f"only on {ranges(topology.memory_nodes)}; leave the option out"
        )
    return found


def _by_node(cpus: list[Cpu]) -> dict[int, list[Cpu]]:
    found: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        found[cpu.node].append(cpu)
    return dict(found)


def _order(cpu: Cpu) -> tuple[int, int, int, int]:
    return cpu.node, cpu.socket, cpu.core, cpu.number


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _more_cores(topology: Topology, request: Request) -> str:
    """The option that adds processors, where there are more."""
    cores = {cpu.core for cpu in topology.usable()}
    if request.cores or request.use_logical_cores or len(cores) == len(topology.usable()):
        return ""
    return "; --use-logical-cores counts every thread of a core"
