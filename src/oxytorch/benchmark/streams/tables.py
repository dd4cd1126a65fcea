"""Results of `oxytorch bench streams` as tables: what do more streams gain?"""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import paired_ratio
from oxytorch.benchmark.report.tables import (
    Table,
    milliseconds,
    peer_record,
    reasons,
    time_cell,
)

COLUMNS = ("streams", "threads of the first", "a call", "items/s", "over one stream")


def stream_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each model, dtype and batch size."""
    return [_table(result) for result in results]


def _table(result: Result) -> Table:
    title = (
        f"Streams of {result['title']}, {result['dtype']}, batch {result['batch']}, "
        f"{result['threads']} threads"
    )
    table = Table(title, [*COLUMNS])
    table.rows = [_row(result, record) for record in result["peers"]]
    table.notes = reasons([result], lambda found: str(found["model"]))
    return table


def _row(result: Result, record: Record) -> list[str]:
    notes = record.get("notes", {})
    head = [
        str(notes.get("streams", record["label"])),
        str(notes.get("cores_of_first", result["threads"])),
    ]
    if not is_measured(record):
        return [*head, time_cell(record), "-", "-"]
    seconds = record["seconds"]["median"]
    one = peer_record(result, "streams_1")
    ratio = "-"
    if one is not None and is_measured(one):
        ratio = f"{paired_ratio(one['rounds'], record['rounds'])['median']:.2f}x"
    return [*head, milliseconds(seconds), f"{result['batch'] / seconds:.0f}", ratio]
