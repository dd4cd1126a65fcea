"""Sockets, NUMA nodes, cores and their threads, and which of them this process may use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..core.system_files import numbers, text_of

# Cores whose highest frequency is this far below the machine's highest are efficiency cores, where
# the kernel does not list these.
SLOWER = 0.85


@dataclass(frozen=True)
class Cpu:
    """One logical processor, by the number that Linux gives it.

    core: the lowest number among the processors of the same physical core.
    """

    number: int
    core: int
    socket: int
    node: int
    is_efficient: bool = False


@dataclass(frozen=True)
class Topology:
    """The processors that are online, and what this process may use.

    allowed: processors that its affinity and its cpuset leave it.
    memory_nodes: NUMA nodes on which it may allocate memory.
    quota: processors' worth of time that its cgroups grant; None where it is not limited.
    """

    cpus: tuple[Cpu, ...]
    allowed: frozenset[int]
    memory_nodes: frozenset[int]
    quota: float | None = None

    def usable(self) -> list[Cpu]:
        """The processors that this process may use."""
        return [cpu for cpu in self.cpus if cpu.number in self.allowed]


def read_topology(root: Path = Path("/")) -> Topology:
    """The topology that Linux describes in /sys and /proc below `root`.

    What a machine or a container does not tell is taken to be absent: one socket, one node, a core
    for each processor, no quota.
    """
    system = root / "sys/devices/system"
    status = text_of(root / "proc/self/status")
    allowed = _listed(status, "Cpus_allowed_list")
    online = numbers(text_of(system / "cpu/online")) or sorted(allowed) or [0]
    nodes = _nodes(system / "node")
    efficient = _efficient(root, online)
    cpus = []
    for number in online:
        folder = system / f"cpu/cpu{number}/topology"
        siblings = text_of(folder / "core_cpus_list") or text_of(folder / "thread_siblings_list")
        socket = text_of(folder / "physical_package_id").strip()
        cpus.append(
            Cpu(
                number=number,
                core=min(numbers(siblings), default=number),
                socket=max(int(socket or 0), 0),  # -1 where the firmware does not tell
                node=nodes.get(number, 0),
                is_efficient=number in efficient,
            )
        )
    known = {cpu.node for cpu in cpus}
    return Topology(
        cpus=tuple(cpus),
        allowed=frozenset(allowed).intersection(online) if allowed else frozenset(online),
        memory_nodes=frozenset(_listed(status, "Mems_allowed_list") or known),
        quota=read_quota(root),
    )


def read_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the cgroups of this process grant: the least of its own and
    those above it, of version 1 and 2; None where none limits it."""
    mounted = root / "sys/fs/cgroup"
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchies, read = [mounted, mounted / "unified"], _quota_of_version_2
        elif "cpu" in controllers.split(","):
            hierarchies, read = [mounted / "cpu", mounted / controllers], _quota_of_version_1
        else:
            continue
        for hierarchy in hierarchies:
            # In a container the path may be the host's, which does not exist below the mount; the
            # mount itself is then the container's own cgroup.
            own = hierarchy / path.strip("/")
            folders = [own, *own.parents]
            found += [read(folder) for folder in folders if folder.is_relative_to(hierarchy)]
    return min((quota for quota in found if quota is not None), default=None)


def _nodes(folder: Path) -> dict[int, int]:
    """The NUMA node of each processor."""
    found = {}
    for node in sorted(folder.glob("node[0-9]*")):
        for number in numbers(text_of(node / "cpulist")):
            found[number] = int(node.name.removeprefix("node"))
    return found


def _efficient(root: Path, online: list[int]) -> set[int]:
    """Processors of efficiency cores: as the kernel lists them, or by their highest frequency."""
    listed = numbers(text_of(root / "sys/devices/cpu_atom/cpus"))
    if listed or text_of(root / "sys/devices/cpu_core/cpus"):
        return set(listed)
    cpu = root / "sys/devices/system/cpu"
    texts = {number: text_of(cpu / f"cpu{number}/cpufreq/cpuinfo_max_freq") for number in online}
    frequencies = {number: int(text) for number, text in texts.items() if text.strip()}
    fastest = max(frequencies.values(), default=0)
    return {number for number, value in frequencies.items() if value <= SLOWER * fastest}


def _quota_of_version_2(folder: Path) -> float | None:
    words = text_of(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_of_version_1(folder: Path) -> float | None:
    granted = text_of(folder / "cpu.cfs_quota_us").strip()
    period = text_of(folder / "cpu.cfs_period_us").strip()
    return int(granted) / int(period) if period and int(granted or -1) > 0 else None


def _listed(status: str, name: str) -> list[int]:
    line = re.search(rf"^{name}:\s*(\S+)$", status, re.MULTILINE)
    return numbers(line[1]) if line else []
