"""Processes of contestants that stay alive and take turns."""

from __future__ import annotations

import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.core.jobs import JobError, cause_of_death, environment
from oxytorch.benchmark.llm.task import LlmTask


class ContestantProcess:
    """One contestant in a process of its own (`llm_worker`).

    Between requests the process sleeps with all its memory. Every method raises JobError where the
    process reports an error, dies, or gives no sign of life for `silence` seconds.
    """

    def __init__(self, peer: str, silence: float) -> None:
        self.peer = peer
        self.silence = silence
        self._folder = tempfile.TemporaryDirectory(prefix="oxytorch-llm-bench-")
        self._log = Path(self._folder.name) / "log.txt"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "oxytorch.benchmark.llm.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(self._folder.name),
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def prepare(self, task: LlmTask, on_stage: Callable[[str], None]) -> dict[str, Any]:
        """What the contestant says of itself once it is ready; raises `Absent` if it has to."""
        fields = {
            field.name: getattr(task, field.name)
            for field in dataclasses.fields(task)
            if field.name not in ("progress", "work")
        }
        result = self._ask(
            {"do": "prepare", "peer": self.peer, "task": {**fields, "work": str(task.work)}},
            on_stage,
        )
        assert isinstance(result, dict)
        return result

    def ask(self, what: str, **arguments: object) -> Any:
        """The answer to one of the worker's requests."""
        return self._ask({"do": what, **arguments}, lambda stage: None)

    def _ask(self, request: dict[str, object], on_stage: Callable[[str], None]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            while (line := self._lines.get(timeout=self.silence)) is not None:
                event = json.loads(line)
                if event["event"] == "result":
                    return event["result"]
                if event["event"] == "absent":
                    raise Absent(event["reason"])
                if event["event"] == "error":
                    raise JobError(event["reason"], self.peer)
                on_stage(event["stage"])
        except queue.Empty:
            reason = f"gave no sign of life for {self.silence:.0f} s"
            raise JobError(reason, self.peer) from None
        except BrokenPipeError:
            pass
        raise JobError(cause_of_death(self._process.wait(), self._log), self.peer)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
