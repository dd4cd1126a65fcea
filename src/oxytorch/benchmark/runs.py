"""A run of one subject: its head, and its jobs one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.kept import keeping
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.core.results import Run, new_run
from oxytorch.benchmark.core.subject import Subject
from oxytorch.benchmark.report.terminal import watching


def start(subject: Subject, command: str, settings: Settings) -> Run:
    """The head of a run's file; says on standard error where the machine is busy."""
    run = new_run(subject.kind or subject.name, command, asdict(settings))
    load = run["machine"]["load"]
    if load is not None and load > 0.5:
        print(
            f"oxytorch bench: other programs keep this machine busy (load {load}); "
            f"expect wrong numbers",
            file=sys.stderr,
        )
    return run


def measure(subject: Subject, settings: Settings, run: Run, paths: Sequence[Path]) -> None:
    """Do the subject's jobs that are left; `paths` hold every result as soon as it is there.

    A job that fails is printed to standard error and noted in `run["failures"]`.
    """
    jobs = {job.name: job for job in subject.jobs(settings)}
    with keeping(run, list(jobs), paths) as kept, watching(len(kept.left())) as watcher:
        for name in kept.left():
            watcher.start(name)
            try:
                jobs[name].do(watcher.stage, kept.add)
            except JobError as error:
                kept.fail(name, str(error))
            else:
                kept.finish(name)
            watcher.finish()
