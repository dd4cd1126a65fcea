"""Results of `oxytorch bench zoo` as tables: which models are slower?"""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Result, is_measured
from oxytorch.benchmark.core.rounds import Spread, paired_ratio
from oxytorch.benchmark.report.tables import (
    Table,
    by,
    fastest_other,
    mean_cell,
    milliseconds,
    peer_record,
    reasons,
    time_cell,
)
from oxytorch.benchmark.zoo.runs import CONTESTANTS, OURS, contestants

LOSS = 0.97
"""Speed over that of the fastest stock way below which a model counts as lost."""


def speed_over_stock(result: Result, peer: str) -> Spread | None:
    """How many times faster a way of ours is than the fastest stock one, round by round."""
    ours, stock = peer_record(result, peer), fastest_other(result)
    if ours is None or stock is None or not is_measured(ours):
        return None
    return paired_ratio(stock["rounds"], ours["rounds"])


def lost(result: Result) -> list[str]:
    """A line for each way of ours that is slower than stock, or that gave no correct outputs."""
    lines = []
    for peer in OURS:
        record, speed = peer_record(result, peer), speed_over_stock(result, peer)
        if record is None:
            continue
        name = f"{result['model']} {result['dtype']} batch {result['batch']}, {record['label']}"
        if speed is None:
            lines.append(f"{name}: {record['status']}: {record.get('reason', '')}")
        elif speed["median"] < LOSS:
            stock = fastest_other(result)
            assert stock is not None
            lines.append(
                f"{name}: {speed['median']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f}) of "
                f"{stock['label']}: {milliseconds(record['seconds']['median'])}, "
                f"{milliseconds(stock['seconds']['median'])}"
            )
    return lines


def zoo_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each dtype, then every loss."""
    tables = [_dtype_table(found, dtype) for dtype, found in by(results, "dtype").items()]
    losses = Table(f"Slower than {LOSS} of the fastest stock way, or not right", ["what"])
    losses.rows = [[line] for result in results for line in lost(result)] or [["none"]]
    return [*tables, losses]


def _dtype_table(results: Sequence[Result], dtype: str) -> Table:
    stock = [name for name in contestants(dtype) if name not in OURS]
    table = Table(f"Zoo, {dtype}", ["model", "batch"])
    table.header += [CONTESTANTS[name].label for name in stock]
    for peer in OURS:
        table.header += [CONTESTANTS[peer].label, "over stock"]
    speeds: dict[str, list[float]] = {peer: [] for peer in OURS}
    for result in results:
        row = [result["title"], str(result["batch"])]
        row += [time_cell(peer_record(result, name)) for name in stock]
        for peer in OURS:
            speed = speed_over_stock(result, peer)
            speeds[peer] += [] if speed is None else [speed["median"]]
            row.append(time_cell(peer_record(result, peer)))
            row.append("-" if speed is None else f"{speed['median']:.2f}x")
        table.rows.append(row)
    means = [cell for peer in OURS for cell in ("", mean_cell(speeds[peer], len(results)))]
    table.rows.append(["geometric mean", "", *[""] * len(stock), *means])
    table.notes = reasons(results, lambda result: f"{result['model']} batch {result['batch']}")
    return table
