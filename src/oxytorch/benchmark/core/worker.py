"""The process in which one job runs: `python -m oxytorch.benchmark.core.worker`.

It reads one job as JSON from standard input and writes events, one JSON line each, to what was
its standard output; whatever a library prints goes to standard error instead.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

JOBS = {
    "model": "oxytorch.benchmark.models.runs",
    "op": "oxytorch.benchmark.ops.runs",
    "optim": "oxytorch.benchmark.optim.runs",
    "gpu-optim": "oxytorch.benchmark.gpu.runs",
    "limits": "oxytorch.benchmark.machine.limits",
    "optimize": "oxytorch.benchmark.machine.costs",
    "zoo": "oxytorch.benchmark.zoo.runs",
}
"""Kind of job -> module with `run_job(job, progress)`: one result, or several as they come."""


def main() -> int:
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    job = json.load(sys.stdin)
    try:
        allocation = "system"
        if job["allocation"] == "reuse":
            from oxytorch.benchmark.machine.allocation import keep_freed_memory

            allocation = keep_freed_memory()
        found = importlib.import_module(JOBS[job["kind"]]).run_job(
            job, lambda peer, stage: send(event="stage", peer=peer, stage=stage)
        )
        for result in [found] if isinstance(found, dict) else found:
            send(event="result", result=result, allocation=allocation)
    except Exception as error:
        from oxytorch.benchmark.core.contest import first_line

        traceback.print_exc()
        send(event="error", reason=first_line(error))
        return 1
    send(event="done")
    # Some peers' libraries crash while they are unloaded, after all the work is done.
    events.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
