"""The process in which one job runs: `python -m oxytorch.benchmark.worker`.

It reads one job as JSON from standard input and writes events, one JSON line each, to what was
its standard output; whatever a library prints goes to standard error instead.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from oxytorch.benchmark.peers import first_line


def _run(job: dict[str, Any], progress: Any) -> dict[str, Any]:
    kind = job["kind"]
    if kind == "model":
        from oxytorch.benchmark.model_runs import run_job

        return run_job(job, progress)
    raise ValueError(f"worker: expected a job of kind 'model', got {kind!r}")


def main() -> int:
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    job = json.load(sys.stdin)
    try:
        result = _run(
            job, lambda peer, stage: send({"event": "stage", "peer": peer, "stage": stage})
        )
    except Exception as error:
        import traceback

        traceback.print_exc()
        send({"event": "error", "reason": first_line(error)})
        return 1
    send({"event": "result", "result": result})
    # Some peers' libraries crash while they are unloaded, after all the work is done.
    events.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
