"""What the process of one contestant of `oxytorch llm bench` is asked for.

`prepare` comes first; the others are about the contestant that it made.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.llm.contestants import PEERS
from oxytorch.benchmark.llm.task import Contestant, LlmTask
from oxytorch.benchmark.machine.limits import matrix_product, measured_rates
from oxytorch.llm_command.read_limit import read_limit


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A contestant that is prepared, its task, and the prompt."""

    contestant: Contestant
    task: LlmTask
    ids: torch.Tensor


_ready: list[_Ready] = []


def prepare(progress: Progress, peer: str, task: dict[str, Any]) -> dict[str, Any]:
    """Makes the contestant; returns what it says of itself."""
    torch.set_num_threads(task["threads"])
    begin = time.perf_counter()
    asked = LlmTask(**{**task, "work": Path(task["work"])}, progress=progress)
    contestant = PEERS[peer].prepare(asked)
    ready = _Ready(contestant, asked, asked.prompt_ids(contestant.vocabulary))
    _ready[:] = [ready]
    progress("", "first call")
    first = contestant.turn(ready.ids, 2)
    return {
        "prepare_seconds": time.perf_counter() - begin,
        "first_call_seconds": sum([first.first, *first.tokens]),
        "token_bytes": sum(contestant.reads),
        "prompt_operations": contestant.operations,
        "notes": contestant.notes,
    }


def logits(progress: Progress, path: str) -> None:
    """Writes the logits after the prompt to a file of torch's."""
    [ready] = _ready
    torch.save(ready.contestant.logits(ready.ids), path)


def turn(progress: Progress) -> dict[str, Any]:
    """One run."""
    [ready] = _ready
    return dataclasses.asdict(ready.contestant.turn(ready.ids, ready.task.tokens))


def limit(progress: Progress) -> float:
    """Bytes per second that this process reads, on buffers allocated as the weights are."""
    [ready] = _ready
    return read_limit(ready.contestant.reads or [64 << 20])


def matrix_rate(progress: Progress) -> float:
    """Operations per second of torch's product of two large bfloat16 matrices."""
    return max(measured_rates({"product": matrix_product(torch.bfloat16)}, rounds=3))


def memory(progress: Progress) -> int:
    """Bytes of memory that are the process's own now (proportional set size)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no line Pss")
