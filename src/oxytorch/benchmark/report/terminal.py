"""What a person sees while and after a benchmark runs; without `rich`, plain text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oxytorch.benchmark.core.results import Run
from oxytorch.benchmark.report.pages import markdown, provenance, tables_of
from oxytorch.benchmark.report.tables import Table


def has_rich() -> bool:
    """Whether the optional package for tables and progress is installed."""
    return importlib.util.find_spec("rich") is not None


def show_run(run: Run) -> None:
    """Print the tables of a run, and how they were measured."""
    for table in tables_of(run):
        show_table(table)
    if run["results"]:
        print(provenance(run))


def show_table(table: Table) -> None:
    """Print a table: drawn by rich in a terminal, Markdown in files, pipes and without rich."""
    if not (has_rich() and sys.stdout.isatty()):
        print(markdown(table) + "\n", flush=True)
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left")
    for index, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*(_styled(cell) for cell in row))
    console = Console()
    console.print(drawn)
    for note in table.notes:
        console.print(f"  {note}", style="dim", highlight=False, markup=False)


def _styled(cell: str) -> Any:
    from rich.text import Text

    if cell.startswith("**") and cell.endswith("**"):
        return Text(cell.strip("*"), style="bold green")
    return Text(cell, style="dim" if cell in ("-", "absent") else "")


class Watcher:
    """Tells which job runs and how far it is; one line per job where nobody watches."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def start(self, job: str) -> None:
        """A job begins."""
        self._job = job
        if self._bar is None:
            print(f"oxytorch bench: {job}", file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, description=job, refresh=True)

    def stage(self, peer: str, stage: str) -> None:
        """The job does something else; its signature is that of `contest.Progress`."""
        if self._bar is not None:
            doing = f"{peer} {stage}" if peer else stage
            self._bar.update(self._task, description=f"{self._job}: {doing}", refresh=True)

    def finish(self) -> None:
        """The job is done."""
        if self._bar is not None:
            self._bar.advance(self._task)


@contextmanager
def watching(jobs: int) -> Iterator[Watcher]:
    """A watcher for a number of jobs; draws a progress bar on a terminal's standard error."""
    if not (has_rich() and sys.stderr.isatty()):
        yield Watcher(None, None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Drawn only between turns: a bar that refreshes itself would take time from what is measured.
    drawing = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    with drawing as bar:
        yield Watcher(bar, bar.add_task("", total=jobs))
