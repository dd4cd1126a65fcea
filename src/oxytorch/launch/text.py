"""The plan and the outcome of a run for a person."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..core.system_files import ranges
from .environment import Environment
from .plan import Instance, Plan
from .processes import Result
from .topology import Topology

AFFINITIES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def describe(
    topology: Topology,
    plan: Plan,
    environment: Environment,
    command: Sequence[str],
    *,
    is_training: bool,
    models: str,
) -> str:
    """What runs, where and with what. models: what is done to models, if anything."""
    what = "rank" if is_training else "instance"
    count = len(plan.instances)
    lines = [f"oxytorch run: {count} {what}{'' if count == 1 else 's'} on {machine(topology)}"]
    table = [(what, "cores", "count", "NUMA nodes", "memory")]
    for one in plan.instances:
        memory = f"node {ranges(one.memory_nodes)} alone" if one.memory_nodes else "nearest node"
        table.append(
            (str(one.index), ranges(one.cpus), str(len(one.cpus)), ranges(one.nodes), memory)
        )
    lines += aligned(table)
    lines += [_row("command", shlex.join(command))]
    lines += [_row("models", models)] if models else []
    libraries = f"allocator {environment.allocator}, OpenMP {environment.openmp}"
    lines += [_row("libraries", libraries)]
    lines += [_row("set", text) for text in _settings(plan, environment)]
    kept = [f"{name}={value}" for name, value in environment.kept.items()]
    lines += [_row("yours, kept", shlex.join(kept))] if kept else []
    notes = [*plan.notes, *environment.notes, *_conflicts(plan, environment)]
    lines += [_row("note", note) for note in notes]
    return "\n".join(lines)


def machine(topology: Topology) -> str:
    """What the machine consists of, and how much of it this process may use."""
    usable = topology.usable()
    counts = (
        (len({cpu.socket for cpu in topology.cpus}), "socket"),
        (len({cpu.node for cpu in topology.cpus}), "NUMA node"),
        (len({cpu.core for cpu in topology.cpus}), "core"),
        (len(topology.cpus), "thread"),
    )
    text = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts)
    if len(usable) < len(topology.cpus):
        text += f"; usable: {ranges(cpu.number for cpu in usable)}"
    if topology.quota is not None:
        text += f"; quota: {topology.quota:g} cores' worth of time"
    return text


def summary(what: str, rows: Sequence[tuple[str, str]], result: Result) -> str:
    """How each process ended. rows: the name and the cores of each."""
    table = [(what, "cores", "seconds", "exit status")]
    for (name, cores), outcome in zip(rows, result.outcomes, strict=True):
        status = f"{outcome.status}{' (ended)' if outcome.was_ended else ''}"
        table.append((name, cores, f"{outcome.seconds:.1f}", status))
    return "\n".join(["oxytorch run: summary", *aligned(table)])


def rows_of(instances: Sequence[Instance]) -> list[tuple[str, str]]:
    """Name and cores of each instance."""
    return [(str(one.index), ranges(one.cpus)) for one in instances]


def _settings(plan: Plan, environment: Environment) -> list[str]:
    """The variables that are set; the number of threads by instance where it differs."""
    each = [environment.variables_of(len(one.cpus)) for one in plan.instances]
    common = dict(each[0].items() & each[-1].items()) if each else {}
    lines = [f"{name}={value}" for name, value in each[0].items() if name in common]
    if "OMP_NUM_THREADS" in each[0] and "OMP_NUM_THREADS" not in common:
        lines.insert(0, "OMP_NUM_THREADS=" + ",".join(v["OMP_NUM_THREADS"] for v in each))
    return lines


def _conflicts(plan: Plan, environment: Environment) -> list[str]:
    """What variables of the user's do to the plan."""
    notes = []
    names = [name for name in AFFINITIES if name in environment.kept]
    if names and len(plan.instances) > 1:
        notes.append(f"{', '.join(names)} of yours may put all instances on the same cores")
    threads = environment.kept.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and any(int(threads) > len(one.cpus) for one in plan.instances):
        notes.append(f"OMP_NUM_THREADS={threads} of yours is more than an instance has cores")
    return notes


def _row(label: str, text: str) -> str:
    return f"  {label:<12} {text}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
