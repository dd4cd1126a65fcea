"""Results that are kept as they come, so that a run that is cut off leaves a valid file.

A subject of `oxytorch bench` needs none of this by name: `runs.measure` does it. Other programs
measure inside `keeping`::

    run = new_run("models", command, settings)
    with keeping(run, ["bert float32", "bert bfloat16"], [path]) as kept:
        for job in kept.left():
            try:
                for result in measure(job):
                    kept.add(result)
            except JobError as error:
                kept.fail(job, str(error))
            else:
                kept.finish(job)

A job is what is done again where it was cut off; its name says what it measures. `paths` may be
empty. `add`, `fail` and `finish` write the file at once. Its `done` and `left` name the jobs that
are done and those that are not: a run with something `left` is incomplete. The kind of run has to
stand in `kinds.KINDS`, which says what tells its results apart: a result replaces an earlier one of
the same thing, so that a job that is done again leaves nothing twice. Ctrl-C and signals that end
the process pass through `keeping` as exceptions, so that contexts inside close (and end their
processes), and it says on standard error what was kept and how to go on.
"""

from __future__ import annotations

import datetime
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from oxytorch.benchmark.core.results import Result, Run, read_run, write_run
from oxytorch.benchmark.kinds import KINDS
from oxytorch.benchmark.machine.description import describe_machine, describe_versions

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Kept:
    """The run that is measured and the files that hold it; made by `keeping`.

    Attributes:
        run: the run as it stands in the files.
        paths: files that always hold all of it.
    """

    def __init__(self, run: Run, paths: Sequence[Path]) -> None:
        self.run = run
        self.paths = tuple(paths)

    def left(self) -> list[str]:
        """Names of the jobs that are neither finished nor failed, in order."""
        return list(self.run["left"])

    def add(self, result: Result) -> None:
        """Keep a result, in place of an earlier one of the same thing."""
        results, key = self.run["results"], KINDS[self.run["kind"]].key
        keys = [key(earlier) for earlier in results]
        if key(result) in keys:
            results[keys.index(key(result))] = result
        else:
            results.append(result)
        self._write()

    def finish(self, job: str) -> None:
        """Note that a job is done."""
        self.run["left"].remove(job)
        self.run["done"].append(job)
        self._write()

    def fail(self, job: str, reason: str) -> None:
        """Note that a job cannot be done, and why; it is printed to standard error too."""
        print(f"oxytorch bench: {job}: {reason}", file=sys.stderr)
        self.run["failures"].append({"job": job, "reason": reason})
        self.finish(job)

    def _write(self) -> None:
        for path in self.paths:
            write_run(self.run, path)


@contextmanager
def keeping(run: Run, jobs: Sequence[str], paths: Sequence[Path]) -> Iterator[Kept]:
    """Keep a run in files while it is measured; of a run that is continued, `jobs` says what all
    of it is.

    Raises:
        ValueError: two jobs have one name, or the run has done something that is no job of it.
    """
    if len(set(jobs)) != len(jobs):
        raise ValueError(f"keeping: expected jobs of different names, got {', '.join(jobs)}")
    done = run.setdefault("done", [])
    strangers = [job for job in done if job not in jobs]
    if strangers:
        raise ValueError(
            f"keeping: expected jobs that have {strangers[0]!r}, which is done already"
        )
    run["left"] = [job for job in jobs if job not in done]
    run.setdefault("failures", [])
    kept = Kept(run, paths)
    kept._write()
    try:
        with _ended_by_exceptions():
            yield kept
    except (KeyboardInterrupt, SystemExit):
        print(f"oxytorch bench: cut off; {_what_is_kept(kept)}", file=sys.stderr)
        raise


def _what_is_kept(kept: Kept) -> str:
    run = kept.run
    count = f"{len(run['results'])} results, {len(run['done'])} of "
    count += f"{len(run['done']) + len(run['left'])} jobs"
    if not kept.paths:
        return f"{count} were measured and no file was asked for"
    return f"{kept.paths[0]} keeps {count}; {how_to_continue(run, kept.paths[0])}"


def how_to_continue(run: Run, path: Path) -> str:
    """What a person has to do for the jobs of a run that are left."""
    if str(run["command"]).startswith("oxytorch bench "):
        return f"go on with: oxytorch bench continue {path}"
    return f"not done: {', '.join(run['left'])}"


@contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """Signals that would end the process at once leave by SystemExit meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reopened(path: Path) -> Run:
    """An incomplete run, to be continued on the same machine with the same versions.

    Raises:
        ValueError: the file is no results file, the run is complete, or it was measured on another
            machine or with other versions.
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"bench continue: {path} does not exist")
    run = read_run(path)
    if not run.get("left"):
        raise ValueError(f"bench continue: {path} is complete: expected one with jobs left to do")
    here = {**describe_machine(), **describe_versions()}
    for name, value in {**run["machine"], **run["versions"]}.items():
        if name != "load" and here.get(name) != value:
            raise ValueError(
                f"bench continue: {path}: expected the machine and versions that it was begun "
                f"with, but {name} was {value} and is {here.get(name)}; begin a new run"
            )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    run.setdefault("continued", []).append(now)
    return run
