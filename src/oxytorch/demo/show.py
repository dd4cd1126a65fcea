"""What the demo prints: progress on the error stream, results on the output stream."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import isa
from .embedding import BATCH
from .session import TOLERANCE, Row, Session
from .variants import OPTIMIZED

BUSY = 0.7  # load above which others take a share of the processor
SHOWN = OPTIMIZED  # whose finds are listed


def output() -> Console:
    """The console for results: as wide as the terminal, or 100 columns in a file or pipe."""
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that starts the next step; shows a bar, or lines without a terminal."""
    if not sys.stderr.isatty():
        taken = iter(range(1, steps + 1))
        yield lambda text: print(f"[{next(taken)}/{steps}] {text}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), BarColumn(24), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task("starting", total=steps)
        first = True

        def begin(text: str) -> None:
            nonlocal first
            bar.update(task, description=text, advance=0 if first else 1)
            first = False

        yield begin


def table(rows: Sequence[Row], stock: Row) -> Table:
    """The rows side by side, with speed-ups against `stock`."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("\nmodel", no_wrap=True)
    for heading in (
        "one text\nms",
        "\nspeed-up",
        f"batches of {BATCH}\ntexts/s",
        "\nspeed-up",
        "peak\nMiB",
        "largest\ndifference",
        "lowest\ncosine",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        same = row is stock
        shown.add_row(
            row.name,
            f"{row.latency * 1e3:.2f}",
            f"{stock.latency / row.latency:.2f}x",
            f"{row.throughput:.0f}",
            f"{row.throughput / stock.throughput:.2f}x",
            "-" if row.peak is None else f"{row.peak / 2**20:.0f}",
            "-" if same else f"{row.difference:.1e}",
            "-" if same else f"{row.cosine:.6f}",
            style="bold" if row.name.startswith("optimized") else None,
        )
    return shown


def shorten(text: str, width: int) -> str:
    """The text in one line of at most `width` characters."""
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def report(session: Session, console: Console) -> None:
    """Prints the results of a finished session."""
    console.rule("What optimize did", align="left", characters="-")
    for line in session.explanation.splitlines():
        console.print(shorten(line, console.width), markup=False)

    console.print()
    console.rule("Speed, memory and outputs", align="left", characters="-")
    console.print(table(session.rows, session.rows[0]))
    console.print(
        f"\nall-MiniLM-L6-v2, {session.parameters / 1e6:.1f} M parameters; "
        f"{torch.get_num_threads()} threads, level {isa.active()}, torch {torch.__version__}.\n"
        f"One text is {session.timed_tokens} tokens; the batches hold all "
        f"{len(session.texts)} texts. The models take turns;\n"
        "times are medians from tokens to vectors.\n"
        "Peak is the resident memory of a process of its own, above its imports: loading, "
        "optimizing\nand the batch of the longest texts.\n"
        f"Difference and cosine compare {len(session.texts)} vectors of length 1 with stock fp32.",
        style="dim",
    )

    if session.load > BUSY:
        console.print(
            f"Other programs were running (load {session.load:.1f}): the times are rough.",
            style="bold yellow",
        )

    console.print()
    console.rule(f"Nearest texts, found by the {SHOWN.name} model", align="left", characters="-")
    for query, found in session.nearest.items():
        console.print(f"{query}", style="bold", markup=False)
        for similarity, row in found[SHOWN.name]:
            line = shorten(session.texts[row], console.width - 8)
            console.print(f"  {similarity:.2f}  {line}", markup=False)
    console.print(f"\n{agreement(session)}")

    fp32 = next(row for row in session.rows if row.name == OPTIMIZED.name)
    verdict = "the same outputs as" if session.faithful else "NOT the same outputs as"
    console.print(
        f"Optimized fp32 gives {verdict} stock: largest difference {fp32.difference:.1e}, "
        f"allowed {TOLERANCE:.0e}.",
        style="bold green" if session.faithful else "bold red",
    )
    console.print('Next: your own text: oxytorch demo --text FILE --query "..."')


def agreement(session: Session) -> str:
    """One sentence on how many of the texts shown the other models find."""
    total = sum(len(found[SHOWN.name]) for found in session.nearest.values())
    shared: Counter[str] = Counter()
    for found in session.nearest.values():
        shown = {row for _, row in found[SHOWN.name]}
        for name, rows in found.items():
            shared[name] += sum(row in shown for _, row in rows)
    counts = ", ".join(f"{name} {shared[name]}" for name in shared if name != SHOWN.name)
    return f"Of these {total} texts the other models find: {counts}."
