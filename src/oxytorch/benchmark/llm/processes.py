"""Processes of contestants that stay alive and take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxytorch.benchmark.core.processes import Process
from oxytorch.benchmark.llm.task import LlmTask


class ContestantProcess:
    """One contestant in a process of its own, which calls the functions of `requests`.

    Between requests the process sleeps with all its memory. Every method raises JobError where the
    process reports an error, dies, or gives no sign of life for `silence` seconds.
    """

    def __init__(self, peer: str, silence: float) -> None:
        self.peer = peer
        self._process = Process(silence)

    def prepare(self, task: LlmTask, on_stage: Callable[[str], None]) -> dict[str, Any]:
        """What the contestant says of itself once it is ready; raises `Absent` if it has to."""
        fields = {**vars(task), "work": str(task.work)}
        del fields["progress"]
        result = self._ask("prepare", on_stage, peer=self.peer, task=fields)
        assert isinstance(result, dict)
        return result

    def ask(self, what: str, **arguments: object) -> Any:
        """The answer to one of the other requests."""
        return self._ask(what, lambda stage: None, **arguments)

    def _ask(self, what: str, on_stage: Callable[[str], None], **arguments: object) -> Any:
        module = "oxytorch.benchmark.llm.requests"
        calls = self._process.call(module, what, arguments, lambda peer, stage: on_stage(stage))
        [answer] = calls
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
