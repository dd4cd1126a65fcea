"""Machines as Linux describes them below /sys and /proc, written from a few lines of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oxytorch.core.system_files import numbers, ranges


@dataclass(frozen=True)
class Machine:
    """Lists of processors, as Linux writes them.

    second: the second thread of a core, by the first; None for cores of one thread.
    """

    sockets: Sequence[str]
    nodes: Sequence[str]
    second: Callable[[int], int | None] = lambda first: None
    efficient: str = ""

    def write(
        self,
        root: Path,
        *,
        allowed: str | None = None,
        memory: str | None = None,
        files: dict[str, str] | None = None,
    ) -> Path:
        """Write the tree; allowed, memory: what the process may use; files: others, by path."""
        online = sorted(number for socket in self.sockets for number in numbers(socket))
        every = {"sys/devices/system/cpu/online": ranges(online)}
        partner = {first: self.second(first) for first in online}
        partner |= {second: first for first, second in partner.items() if second in online}
        for socket, cpus in enumerate(self.sockets):
            for number in numbers(cpus):
                other = partner.get(number)
                core = [number] if other is None or other not in online else [number, other]
                folder = f"sys/devices/system/cpu/cpu{number}/topology"
                every[f"{folder}/core_cpus_list"] = ranges(core)
                every[f"{folder}/physical_package_id"] = str(socket)
        for node, cpus in enumerate(self.nodes):
            every[f"sys/devices/system/node/node{node}/cpulist"] = cpus
        if self.efficient:
            every["sys/devices/cpu_atom/cpus"] = self.efficient
        every["proc/self/status"] = (
            f"Name:\tpython\nCpus_allowed_list:\t{allowed or ranges(online)}\n"
            f"Mems_allowed_list:\t{memory or ranges(range(len(self.nodes)))}"
        )
        for path, text in {**every, **(files or {})}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
        return root


def _offset(count: int) -> Callable[[int], int | None]:
    """The numbering of most servers: all first threads, then all second ones."""
    return lambda first: first + count if first < count else None


LAPTOP = Machine(["0-3"], ["0-3"])
# 16 cores with two threads each
ONE_SOCKET = Machine(["0-31"], ["0-31"], _offset(16))
# Xeon Platinum 8280: 28 cores a socket
TWO_SOCKETS = Machine(["0-27,56-83", "28-55,84-111"], ["0-27,56-83", "28-55,84-111"], _offset(56))
# Xeon 8490H in the mode SNC4: four nodes of 15 cores in each socket, without second threads
SNC4 = Machine(["0-59", "60-119"], [f"{n * 15}-{n * 15 + 14}" for n in range(8)])
# four sockets whose processors are numbered in turns
FOUR_SOCKETS = Machine(
    [",".join(str(n) for n in range(s, 64, 4)) for s in range(4)],
    [",".join(str(n) for n in range(s, 64, 4)) for s in range(4)],
    _offset(32),
)
# Core i9-12900K: 8 performance cores with neighbouring threads, 8 efficiency cores
HYBRID = Machine(
    ["0-23"], ["0-23"], lambda first: first + 1 if first < 16 and first % 2 == 0 else None, "16-23"
)
