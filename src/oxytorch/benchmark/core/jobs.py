"""Runs jobs in processes of their own, so that no peer can spoil the next model's numbers.

A process that dies or hangs is started again without the peer it died in; that peer's record
then carries the reason.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from oxytorch.benchmark.core.contest import Progress, new_record, refuse
from oxytorch.benchmark.models.contestants import PEERS

Result = dict[str, Any]
OnResult = Callable[[Result], None]
"""Called with every result as it comes."""


class JobError(RuntimeError):
    """A job that gave no result; the text is the reason, `peer` whom it happened to."""

    def __init__(self, reason: str, peer: str) -> None:
        super().__init__(reason)
        self.peer = peer


def environment(folder: str) -> dict[str, str]:
    """The user's environment, a fresh compile cache, and no network for hubs and telemetry."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "HF_HUB_OFFLINE": "1",
        "OPENVINO_TELEMETRY_OPT_OUT": "1",
    }


def _lines(stream: IO[str], silence: float) -> Iterator[str]:
    """Lines of a stream; raises queue.Empty after `silence` seconds without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get(timeout=silence)) is not None:
        yield line


def cause_of_death(code: int, log: Path) -> str:
    """Signal or exit status, with the last line the process wrote."""
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{cause}; last line: {lines[-1].strip()[:160]}" if lines else cause


def run_once(job: dict[str, Any], silence: float, progress: Progress, on_result: OnResult) -> None:
    """Run a job in a new process; results come with the allocation they were measured under.

    Raises:
        JobError: the process reported an error, died, or was silent for `silence` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="oxytorch-bench-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "oxytorch.benchmark.core.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(folder),
                text=True,
            )
        assert process.stdin is not None and process.stdout is not None
        peer = ""
        try:
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            for line in _lines(process.stdout, silence):
                event = json.loads(line)
                if event["event"] == "done":
                    return
                if event["event"] == "error":
                    raise JobError(event["reason"], peer)
                if event["event"] == "result":
                    on_result({**event["result"], "allocation": event["allocation"]})
                    continue
                peer = event["peer"]
                progress(peer, event["stage"])
            raise JobError(cause_of_death(process.wait(), log), peer)
        except queue.Empty:
            raise JobError(f"gave no sign of life for {silence:.0f} s", peer) from None
        finally:
            process.kill()
            process.wait()


def run_contest(
    job: dict[str, Any], silence: float, progress: Progress, on_result: OnResult
) -> None:
    """As `run_once`; peers that took the process down are in the results with status "failed".

    After such a death everything is measured again without the peer, and comes again.

    Raises:
        JobError: the process failed in a part that belongs to no peer that could be left out.
    """
    lost: dict[str, str] = {}

    def with_lost(result: Result) -> None:
        for peer, reason in lost.items():
            label = PEERS[peer].label if peer in PEERS else job.get("labels", {}).get(peer, peer)
            record = new_record(peer, label)
            refuse(record, "failed", reason)
            result["peers"].append(record)
        on_result(result)

    while True:
        remaining = [peer for peer in job["peers"] if peer not in lost]
        try:
            return run_once({**job, "peers": remaining}, silence, progress, with_lost)
        except JobError as error:
            if error.peer not in remaining or error.peer == "eager":
                raise
            lost[error.peer] = str(error)
