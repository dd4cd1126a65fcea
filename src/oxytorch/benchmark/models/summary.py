"""One short table of whole models, for a page that is read on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.rounds import geometric_mean
from oxytorch.benchmark.report.tables import (
    Result,
    Table,
    fastest_other,
    is_measured,
    milliseconds,
    peer_record,
)

STOCK = ("eager", "eager_cast")


def summary_table(results: Sequence[Result]) -> Table:
    """A row per model; for each dtype faster stock PyTorch, the fastest other peer and oxytorch."""
    dtypes = list(dict.fromkeys(result["dtype"] for result in results))
    table = Table("Whole models", ["model"])
    for dtype in dtypes:
        table.header += [f"{dtype}: PyTorch", "fastest peer", "oxytorch"]
    ratios: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for key in dict.fromkeys((result["title"], result["batch"]) for result in results):
        row = [f"{key[0]}, batch {key[1]}"]
        for dtype in dtypes:
            found = [r for r in results if (r["title"], r["batch"], r["dtype"]) == (*key, dtype)]
            cells, ratio = _cells(found[-1]) if found else (["-"] * 3, None)
            row += cells
            ratios[dtype] += [] if ratio is None else [ratio]
        table.rows.append(row)
    last = ["geometric mean over PyTorch"]
    for dtype in dtypes:
        mean = f"{geometric_mean(ratios[dtype]):.2f}x" if ratios[dtype] else "-"
        last += ["1.00x", "", mean]
    table.rows.append(last)
    return table


def _cells(result: Result) -> tuple[list[str], float | None]:
    """Times of stock PyTorch, of the fastest peer beside it and of oxytorch, and our speed-up."""
    peers = [record for record in result["peers"] if is_measured(record)]
    ours = peer_record(result, "oxytorch")
    stock = fastest_other({"peers": [r for r in peers if r["peer"] in STOCK]})
    other = fastest_other({"peers": [r for r in peers if r["peer"] not in STOCK]})
    stock_cell = "-" if stock is None else _time(stock)
    other_cell = "-" if other is None else f"{_time(other)} {other['label']}"
    if ours is None or not is_measured(ours):
        return [stock_cell, other_cell, "-" if ours is None else str(ours["status"])], None
    seconds = float(ours["seconds"]["median"])
    fastest = fastest_other(result)
    is_best = fastest is None or seconds <= fastest["seconds"]["median"]
    if stock is None:
        return [stock_cell, other_cell, _time(ours)], None
    ratio = float(stock["seconds"]["median"]) / seconds
    own = f"{_time(ours)} ({ratio:.2f}x)"
    return [stock_cell, other_cell, f"**{own}**" if is_best else own], ratio


def _time(record: Result) -> str:
    return milliseconds(record["seconds"]["median"])
