"""Processes that measure, so that no peer can spoil the next model's numbers."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.contest import Absent, Progress


class JobError(RuntimeError):
    """A job that gave no result; the text is the reason, `peer` whom it happened to."""

    def __init__(self, reason: str, peer: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Process:
    """A process that calls functions for this one, one after the other; `worker` is its program.

    Between calls it sleeps with all its memory. It has the user's environment, a fresh compile
    cache, and no network for hubs and telemetry.

    Args:
        silence: seconds without any sign of life after which a call is given up.
    """

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self._folder = tempfile.TemporaryDirectory(prefix="oxytorch-bench-")
        self._log = Path(self._folder.name) / "log.txt"
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": self._folder.name,
            "HF_HUB_OFFLINE": "1",
            "OPENVINO_TELEMETRY_OPT_OUT": "1",
        }
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "oxytorch.benchmark.core.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        # a SimpleQueue, since a signal handler may raise while it is waited for
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def call(
        self, module: str, function: str, arguments: Mapping[str, Any], progress: Progress
    ) -> Iterator[Any]:
        """Call `function(progress, **arguments)` there; its result, or each one of its iterator.

        Raises:
            Absent: the function raised it.
            JobError: it raised something else, or the process died or gave no sign of life.
        """
        assert self._process.stdin is not None
        request = {"module": module, "function": function, "arguments": arguments}
        peer = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            while (line := self._lines.get(timeout=self.silence)) is not None:
                event = json.loads(line)
                if event["event"] == "done":
                    return
                if event["event"] == "absent":
                    raise Absent(event["reason"])
                if event["event"] == "error":
                    raise JobError(event["reason"], peer)
                if event["event"] == "result":
                    yield event["result"]
                    continue
                peer = event["peer"]
                progress(peer, event["stage"])
        except queue.Empty:
            raise JobError(f"gave no sign of life for {self.silence:.0f} s", peer) from None
        except BrokenPipeError:
            pass  # it has died; the reason is reported below
        raise JobError(cause_of_death(self._process.wait(), self._log), peer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def cause_of_death(code: int, log: Path) -> str:
    """Signal or exit status, with the last line the process wrote."""
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{cause}; last line: {lines[-1].strip()[:160]}" if lines else cause
