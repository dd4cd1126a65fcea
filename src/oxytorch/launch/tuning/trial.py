"""One trial: a script in a placement, started as `oxytorch run` starts it."""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import command
from ..processes import Result, run_jobs
from .figures import Figure, Limit
from .placements import Placement

LAST_LINES = 12
"""Of a trial's output, kept to show what went wrong."""
LONGEST_LINE = 300


class NotStartedError(Exception):
    """`oxytorch run` does not start a script so; the text is its own."""


class InterruptError(Exception):
    """The user has ended a trial."""


@dataclass(frozen=True)
class Trial:
    """What came of a trial.

    value: the figure; limits: those of the limits.
    failure: why there is none.
    is_silent: because the script printed none; is_late: because it took too long.
    peak: bytes of the largest process.
    tail: the last lines of the output of the instance that failed or printed no figure.
    """

    value: float | None = None
    limits: tuple[float, ...] = ()
    failure: str = ""
    is_silent: bool = False
    is_late: bool = False
    seconds: float = 0.0
    peak: int = 0
    tail: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @staticmethod
    def read(data: dict[str, Any]) -> Trial:
        """Of what `data` gave."""
        return Trial(**{**data, "limits": tuple(data["limits"]), "tail": tuple(data["tail"])})


@dataclass(frozen=True)
class Script:
    """What is started in each trial.

    options: of `oxytorch run`, beside those of a placement.
    words: the script or `-m` and module, and arguments.
    meeting: whether it takes `--together FOLDER N`, to begin at the same time in all instances.
    """

    words: Sequence[str]
    options: Sequence[str] = ()
    meeting: bool = False

    def command(self, placement: Placement) -> list[str]:
        """What a user enters for this placement."""
        return ["oxytorch", "run", *placement.words(), *self.options, *self.words]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise NotStartedError(message)


def decide(
    script: Script, placement: Placement, folder: str = ""
) -> tuple[argparse.Namespace, command.Run]:
    """The options and the plan of `oxytorch run`; raises NotStartedError where there is none.

    folder: for the output of each instance.
    """
    parser = _Parser(prog="oxytorch run")
    command.configure(parser)
    words = script.command(placement)[2:]
    words = [*([f"--log-dir={folder}"] if folder else []), *words]
    if script.meeting and folder:
        words += ["--together", folder, str(placement.ninstances)]
    arguments = parser.parse_args(words)
    return arguments, command.decide(arguments)


def run_trial(
    script: Script,
    placement: Placement,
    figure: Figure,
    limits: Sequence[Limit] = (),
    seconds: float | None = None,
) -> Trial:
    """Start all instances, wait for them, and read their figures.

    seconds: after so many the trial has failed. Raises InterruptError after Ctrl-C, when all of
    them have ended.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="oxytorch-tune-") as folder:
        try:
            arguments, decided = decide(script, placement, folder)
        except NotStartedError as problem:
            return Trial(failure=str(problem))
        jobs = [
            replace(job, is_shown=False)
            for job in command.instances_of(arguments, decided, started="trial")
        ]
        result = run_jobs(jobs, said.append, seconds)
        texts = [_text(job.log) for job in jobs]
    if result.cause == "signal":
        raise InterruptError(said[0])
    trial = Trial(
        seconds=_seconds(result, seconds),
        # Of all processes that this one has waited for, whose memory before the start of the script
        # counts too.
        peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    )
    if result.status:
        failure = said[0].partition("; ending")[0] if said else f"exit status {result.status}"
        tail = _tail(texts[_failed(result)])
        why = f": {tail[-1]}" if tail and result.cause == "" else ""
        return replace(trial, failure=failure + why, tail=tail, is_late=result.cause == "time")
    value = figure.of_all(texts)
    for wanted, found in (
        (figure, value),
        *((limit.figure, limit.figure.of_all(texts)) for limit in limits),
    ):
        if found is None:
            silent = next(text for text in texts if wanted.find(text) is None)
            failure = f"printed no {wanted.what}"
            return replace(trial, failure=failure, is_silent=True, tail=_tail(silent))
    assert value is not None
    of_limits = (limit.figure.of_all(texts) for limit in limits)
    return replace(trial, value=value, limits=tuple(each for each in of_limits if each is not None))


def _seconds(result: Result, limit: float | None) -> float:
    """How long the trial took; one that was ended at the limit, not less than that."""
    longest = max(outcome.seconds for outcome in result.outcomes)
    return max(longest, limit or 0.0) if result.cause == "time" else longest


def _failed(result: Result) -> int:
    """The number of the first job that ended by itself with an error."""
    outcomes = result.outcomes
    own = [i for i, each in enumerate(outcomes) if each.status and not each.was_ended]
    return own[0] if own else 0


def _text(path: Path | None) -> str:
    assert path is not None
    return path.read_text(encoding="utf-8", errors="replace")


def _tail(text: str) -> tuple[str, ...]:
    lines = [line.rpartition("\r")[2][:LONGEST_LINE] for line in text.rstrip().splitlines()]
    return tuple(lines[-LAST_LINES:])


def available_memory() -> int | None:
    """Bytes that programs can still have, as Linux estimates; None where it does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
