"""Sockets, NUMA nodes, cores and their threads, and which of them this process may use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    status = _text(root / "proc/self/status")
    allowed = _listed(status, "Cpus_allowed_list")
    online = numbers(_text(system / "cpu/online")) or sorted(allowed) or [0]
    nodes = _nodes(system / "node")
    efficient = _efficient(root, online)
    cpus = []
    for number in online:
        folder = system / f"cpu/cpu{number}/topology"
        siblings = _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")
        socket = _text(folder / "physical_package_id").strip()
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
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
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


def numbers(text: str) -> list[int]:
    """The numbers in a list as Linux writes it: "0-2,8" is 0, 1, 2, 8.

    Raises ValueError for what is no such list.
    """
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        span = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f'expected numbers and ranges such as "0-3,8", got {part!r}')
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return found


def ranges(values: Iterable[int]) -> str:
    """Numbers as Linux writes them: 0, 1, 2, 8 is "0-2,8"."""
    spans: list[list[int]] = []
    for value in sorted(values):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _nodes(folder: Path) -> dict[int, int]:
    """The NUMA node of each processor."""
    found = {}
    for node in sorted(folder.glob("node[0-9]*")):
        for number in numbers(_text(node / "cpulist")):
            found[number] = int(node.name.removeprefix("node"))
    return found


def _efficient(root: Path, online: list[int]) -> set[int]:
    """Processors of efficiency cores: as the kernel lists them, or by their highest frequency."""
    listed = numbers(_text(root / "sys/devices/cpu_atom/cpus"))
    if listed or _text(root / "sys/devices/cpu_core/cpus"):
        return set(listed)
    cpu = root / "sys/devices/system/cpu"
    texts = {number: _text(cpu / f"cpu{number}/cpufreq/cpuinfo_max_freq") for number in online}
    frequencies = {number: int(text) for number, text in texts.items() if text.strip()}
    fastest = max(frequencies.values(), default=0)
    return {number for number, value in frequencies.items() if value <= SLOWER * fastest}


def _quota_of_version_2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_of_version_1(folder: Path) -> float | None:
    granted = _text(folder / "cpu.cfs_quota_us").strip()
    period = _text(folder / "cpu.cfs_period_us").strip()
    return int(granted) / int(period) if period and int(granted or -1) > 0 else None


def _listed(status: str, name: str) -> list[int]:
    line = re.search(rf"^{name}:\s*(\S+)$", status, re.MULTILINE)
    return numbers(line[1]) if line else []


def _text(path: Path) -> str:
    """The text of a file, or an empty string where the system does not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # offline processors list files that cannot be read
        return ""
