"""The JSON that the benchmark writes.

A file is one run: what was asked, on which machine, with which versions, and the results.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from oxytorch.benchmark.machine.description import describe_machine, describe_versions
from oxytorch.core.whole_file import replacing

FORMAT = 1
"""Raised when a reader of older files would misunderstand newer ones."""

Status = Literal["measured", "absent", "failed", "wrong"]


Run = dict[str, Any]
"""What a file holds: the head that `new_run` makes, `results`, and the jobs `done` and `left`."""

Result = dict[str, Any]
"""What was measured of one model, op, optimizer ...; most have `peers`, a record of each."""

Record = dict[str, Any]
"""One contestant in a result.

`peer` is its name, `label` what tables call it. `status` says whether it was measured; `reason` why
not; `notes` what else a reader should know. Times are seconds: `rounds` one for each round,
`seconds` their spread, `prepare_seconds` before the first output. `speedup` is the time of the base
(`eager`) divided by this one's, paired round by round. `difference` is the largest absolute
difference from the base in fp32, divided by the largest magnitude, `allowed_difference` what it may
be. `fraction_of_limit` is the least possible time over the measured one.
"""


def is_measured(record: Record | None) -> bool:
    """Whether there is a record, of a peer that ran with the correct outputs and has times."""
    return record is not None and record["status"] == "measured"


def new_run(kind: str, command: str, settings: dict[str, Any]) -> Run:
    """The head of a results file; `results` is filled by the runner."""
    return {
        "format": FORMAT,
        "kind": kind,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": settings,
        "results": [],
    }


def write_run(run: Run, path: Path) -> None:
    """Write a results file, with its folder; an existing file is replaced.

    Whenever the process ends, the file is whole: the old one or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def read_run(path: Path) -> Run:
    """Read a results file and check that it is one.

    Raises:
        ValueError: the file is not JSON, not a results file, or of a newer format.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"bench: {path} is not a results file: {error}") from error
    found = run.get("format") if isinstance(run, dict) else None
    if not isinstance(found, int) or "kind" not in run or "results" not in run:
        raise ValueError(f"bench: {path} is not a results file of oxytorch bench")
    if found > FORMAT:
        raise ValueError(
            f"bench: {path}: expected format <= {FORMAT}, got {found}; use a newer oxytorch"
        )
    return dict(run)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All results files among the paths; of a folder, every `*.json` below it, oldest first.

    Raises:
        FileNotFoundError: a path does not exist, or no results file was found.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"bench report: {path} does not exist")
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        listed = ", ".join(str(path) for path in paths)
        raise FileNotFoundError(f"bench report: no results file (*.json) in {listed}")
    return sorted((read_run(file) for file in files), key=lambda run: str(run["date"]))
