"""Results of `oxytorch bench models` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.contest import STOCK
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import geometric_mean
from oxytorch.benchmark.report.tables import (
    Table,
    by,
    fastest,
    fastest_other,
    label_of,
    mean_cell,
    median,
    peer_names,
    peer_record,
    peers_table,
    reasons,
    time_cell,
)

DTYPES = ("float32", "bfloat16", "float16", "int8")


def model_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each dtype, then the seconds that peers took to get ready."""
    dtypes = by(results, "dtype")
    tables = [_latencies(dtypes[dtype], dtype) for dtype in DTYPES if dtype in dtypes]
    return [*tables, _preparation(results)]


def _title(result: Result) -> str:
    return f"{result['title']}, batch {result['batch']}"


def _latencies(results: Sequence[Result], dtype: str) -> Table:
    """Latency of every model in one dtype: a column per peer, speed-up over eager in brackets."""
    table = peers_table(f"Whole models, {dtype}", results, {"model": _title})
    peers = peer_names(results)
    means = ["geometric mean of the speed-up"]
    for peer in peers:
        found = [r for r in (peer_record(result, peer) for result in results) if is_measured(r)]
        means.append(mean_cell([r["speedup"]["median"] for r in found if r], len(results)))
    table.rows.append(means + [""] * (len(table.header) - len(means)))
    table.notes = reasons(results, lambda result: str(result["model"]))
    table.notes += _over_faster_stock(results, peers)
    changes = [result["eager_interleaved_over_alone"] for result in results]
    table.notes.append(
        f"Taking turns with the others changed torch eager's own time by a factor of "
        f"{min(changes):.2f} to {max(changes):.2f}."
    )
    return table


def _over_faster_stock(results: Sequence[Result], peers: Sequence[str]) -> list[str]:
    """Mean speed-ups over whichever of the two ways of running stock PyTorch is faster."""
    if "eager_cast" not in peers:
        return []
    means = []
    for peer in peers:
        ratios = []
        for result in results:
            stock = _fastest_stock(result["peers"])
            time = median(peer_record(result, peer))
            if time is not None and stock is not None:
                ratios.append(stock["seconds"]["median"] / time)
        if peer not in STOCK:
            means.append(f"{label_of(results, peer)} {geometric_mean(ratios):.2f}x")
    if not means:
        return []
    return [
        "torch eager runs under autocast, the other row is the model cast to the dtype. "
        f"Geometric means over the faster of the two: {', '.join(means)}."
    ]


def _fastest_stock(records: Sequence[Record]) -> Record | None:
    return fastest([record for record in records if record["peer"] in STOCK])


def _preparation(results: Sequence[Result]) -> Table:
    """Seconds before each peer's first output: optimizing, compiling, converting."""
    peers = [peer for peer in peer_names(results) if peer not in STOCK]
    table = Table(
        "Seconds to get ready: optimizing, converting, compiling",
        ["model", "dtype", *(label_of(results, peer) for peer in peers)],
    )
    for result in results:
        records = [peer_record(result, peer) or {} for peer in peers]
        seconds = [record.get("prepare_seconds") for record in records]
        cells = ["-" if value is None else f"{value:.2f}" for value in seconds]
        table.rows.append([result["model"], result["dtype"], *cells])
    return table


def summary_table(results: Sequence[Result]) -> Table:
    """A row per model; for each dtype faster stock PyTorch, the fastest other peer and oxytorch."""
    dtypes = by(results, "dtype")
    table = Table("Whole models", ["model"])
    for dtype in dtypes:
        table.header += [f"{dtype}: PyTorch", "fastest peer", "oxytorch"]
    ratios: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for title in dict.fromkeys(_title(result) for result in results):
        row = [title]
        for dtype, of_dtype in dtypes.items():
            found = [result for result in of_dtype if _title(result) == title]
            cells, ratio = _summary_cells(found[-1]) if found else (["-"] * 3, None)
            row += cells
            ratios[dtype] += [] if ratio is None else [ratio]
        table.rows.append(row)
    last = ["geometric mean over PyTorch"]
    for dtype in dtypes:
        last += ["1.00x", "", mean_cell(ratios[dtype], len(ratios[dtype]))]
    table.rows.append(last)
    return table


def _summary_cells(result: Result) -> tuple[list[str], float | None]:
    """Times of stock PyTorch, of the fastest peer beside it and of oxytorch, and our speed-up."""
    stock, ours = _fastest_stock(result["peers"]), peer_record(result, "oxytorch")
    peers = [record for record in result["peers"] if record["peer"] not in STOCK]
    other = fastest_other({"peers": peers})
    cells = [time_cell(stock), "-" if other is None else f"{time_cell(other)} {other['label']}"]
    seconds, best = median(ours), median(fastest_other(result))
    if seconds is None or stock is None:
        return [*cells, time_cell(ours)], None
    ratio = float(stock["seconds"]["median"]) / seconds
    own = f"{time_cell(ours)} ({ratio:.2f}x)"
    return [*cells, f"**{own}**" if best is None or seconds <= best else own], ratio
