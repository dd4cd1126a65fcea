"""Results of `oxytorch bench optim` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.report.tables import (
    Table,
    fraction_cell,
    label_of,
    peer_names,
    peer_record,
    reasons,
    spread_cell,
    tables_by,
    time_cell,
)


def _steps(results: Sequence[Result]) -> Table:
    """A row per optimizer and format of oxytorch."""
    first = results[0]
    peers = [peer for peer in ("foreach", "fused", "predecessor") if peer in peer_names(results)]
    table = Table(
        f"One step, {first['title']}: {first['parameters'] / 1e6:.0f} M parameters "
        f"in {first['tensors']} tensors",
        [
            *("optimizer", "parameters + states", "bytes each"),
            *(label_of(results, peer) for peer in peers),
            *("oxytorch", "time over peer's", "least traffic", "of the limit"),
        ],
    )
    for result in results:
        ours = [record for record in result["peers"] if record["peer"].startswith("oxytorch")]
        others = [time_cell(peer_record(result, peer)) for peer in peers]
        for index, record in enumerate(ours):
            times = others if index == 0 else [""] * len(peers)
            table.rows.append([result["optimizer"], *_own_cells(result, record, times)])
    limits = [result["read_write_bandwidth"]["median"] / 1e9 for result in results]
    table.notes = reasons(results, lambda result: str(result["optimizer"]))
    table.notes.append(
        f"The limit is the bandwidth of a copy or a change in place, whichever is faster, in the "
        f"same rounds: {min(limits):.1f} to {max(limits):.1f} GB/s. "
        "Every format is compared with the peer's float32 step."
    )
    return table


def _own_cells(result: Result, record: Record, times: Sequence[str]) -> list[str]:
    if not is_measured(record):
        return [record["format"], "-", *["-"] * len(times), time_cell(record), "-", "-", "-"]
    return [
        record["format"],
        f"{record['bytes_per_parameter']:.2f}",
        *times,
        time_cell(record),
        _over_base_cell(result, record),
        f"{record['bandwidth']['median'] / 1e9:.1f} GB/s",
        fraction_cell(record),
    ]


def _over_base_cell(result: Result, record: Record) -> str:
    base = result["base"]
    if base is None or base == record["peer"]:
        return "-"
    return f"{spread_cell(record['time_over_base'], digits=2)} {label_of([result], base)}"


optim_tables = tables_by("case", _steps)
"""Times of one step, for each set of tensors."""
