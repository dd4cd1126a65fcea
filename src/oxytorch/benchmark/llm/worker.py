"""The process of one contestant: `python -m oxytorch.benchmark.llm.worker`.

It reads requests as JSON lines from standard input and answers each with JSON lines on what was its
standard output: stages while it works, then a result or an error. Between two requests it waits, so
that contestants can take turns while all their weights stay in memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.contest import Absent, first_line

Send = Callable[..., None]


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    served = _Served(send)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            send(event="result", result=getattr(served, request.pop("do"))(**request))
        except Absent as absent:
            send(event="absent", reason=str(absent))
        except Exception as error:
            traceback.print_exc()
            send(event="error", reason=first_line(error))
    # Some peers' libraries crash while they are unloaded, after all the work is done.
    answers.close()
    sys.stderr.flush()
    os._exit(0)


class _Served:
    """The requests that a worker knows."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def prepare(self, peer: str, task: dict[str, Any]) -> dict[str, Any]:
        """Makes the contestant; returns what it says of itself."""
        import time

        import torch

        from oxytorch.benchmark.llm.contestants import PEERS
        from oxytorch.benchmark.llm.task import LlmTask

        torch.set_num_threads(task["threads"])
        begin = time.perf_counter()

        def progress(_: str, stage: str) -> None:
            self._send(event="stage", stage=stage)

        self._task = LlmTask(**{**task, "work": Path(task["work"])}, progress=progress)
        self._contestant = PEERS[peer].prepare(self._task)
        self._ids = self._task.prompt_ids(self._contestant.vocabulary)
        self._send(event="stage", stage="first call")
        first = self._contestant.turn(self._ids, 2)
        return {
            "prepare_seconds": time.perf_counter() - begin,
            "first_call_seconds": sum([first.first, *first.tokens]),
            "token_bytes": sum(self._contestant.reads),
            "prompt_operations": self._contestant.operations,
            "notes": self._contestant.notes,
        }

    def logits(self, path: str) -> None:
        """Writes the logits after the prompt to a file of torch's."""
        import torch

        torch.save(self._contestant.logits(self._ids), path)

    def turn(self) -> dict[str, Any]:
        """One run."""
        return dataclasses.asdict(self._contestant.turn(self._ids, self._task.tokens))

    def limit(self) -> float:
        """Bytes per second that this process reads, on buffers allocated as the weights are."""
        from oxytorch.llm_command.read_limit import read_limit

        return read_limit(self._contestant.reads or [64 << 20])

    def matrix_rate(self) -> float:
        """Operations per second of torch's product of two large bfloat16 matrices."""
        import torch

        from oxytorch.benchmark.machine.limits import best_rates, matrix_product

        return max(best_rates({"product": matrix_product(torch.bfloat16)}, rounds=3))

    def memory(self) -> int:
        """Bytes of memory that are the process's own now (proportional set size)."""
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/smaps_rollup has no line Pss")


if __name__ == "__main__":
    sys.exit(main())
