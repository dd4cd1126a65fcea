"""Results as tables: what the tables of all subjects are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import geometric_mean

ORDER = (
    *("eager", "eager_cast", "compile", "onnxruntime", "openvino"),
    *("predecessor", "oxytorch_float", "oxytorch"),
)
"""Peers in the order of columns; others come after them."""


@dataclass
class Table:
    """A table with a title and notes below it; cells marked with ** are the best of their row."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def milliseconds(seconds: float) -> str:
    """About three significant digits in ms or us: `118 ms`, `7.9 ms`, `165 us`."""
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def peer_record(result: Result, peer: str) -> Record | None:
    """The record of a peer in a result, if it took part."""
    return next((record for record in result["peers"] if record["peer"] == peer), None)


def peer_names(results: Sequence[Result]) -> list[str]:
    """Peers with times in at least one result: the known ones in their order, then others."""
    found = {r["peer"] for result in results for r in result["peers"] if is_measured(r)}
    known = [name for name in ORDER if name in found]
    return known + sorted(found - set(known))


def label_of(results: Sequence[Result], peer: str) -> str:
    """What the peer is called in tables."""
    found = (peer_record(result, peer) for result in results)
    return next((str(record["label"]) for record in found if record is not None), peer)


def median(record: Record | None) -> float | None:
    """The record's time, if it has one."""
    return float(record["seconds"]["median"]) if record and is_measured(record) else None


def fastest(records: Sequence[Record]) -> Record | None:
    """The fastest of those that were measured."""
    measured = [record for record in records if is_measured(record)]
    return min(measured, key=lambda record: float(record["seconds"]["median"]), default=None)


def fastest_other(result: Result) -> Record | None:
    """The fastest contestant that is not oxytorch."""
    return fastest([r for r in result["peers"] if not r["peer"].startswith("oxytorch")])


def over_fastest_other(result: Result) -> str:
    """How many times faster oxytorch is than the fastest peer, and which that is."""
    time, other = median(peer_record(result, "oxytorch")), fastest_other(result)
    if time is None or other is None:
        return "-"
    return f"{other['seconds']['median'] / time:.2f}x {other['label']}"


def cell(record: Record | None, text: Callable[[Record], str]) -> str:
    """What `text` says of a record that was measured; else its status."""
    if record is None:
        return "-"
    return text(record) if is_measured(record) else str(record["status"])


def time_cell(record: Record | None) -> str:
    """The record's time."""
    return cell(record, lambda found: milliseconds(found["seconds"]["median"]))


def speed_cell(record: Record | None) -> str:
    """The record's time, and in brackets how many times faster it is than eager."""
    time = time_cell(record)
    if record is None or not is_measured(record) or record["peer"] == "eager":
        return time
    return f"{time} ({record['speedup']['median']:.2f}x)"


def fraction_cell(record: Record | None) -> str:
    """The part of the limit that a record reached, with its quartiles."""
    return cell(
        record,
        lambda found: "{median:.0%} ({low:.0%} to {high:.0%})".format_map(
            found["fraction_of_limit"]
        ),
    )


def spread_cell(
    values: Mapping[str, Any], unit: str = "", factor: float = 1, digits: int = 1
) -> str:
    """Median and quartiles, times a factor; `unit` stands behind the median."""
    middle, low, high = (
        f"{values[name] * factor:.{digits}f}" for name in ("median", "low", "high")
    )
    return f"{middle}{unit} ({low} to {high})"


def mean_cell(values: Sequence[float], count: int) -> str:
    """The geometric mean of ratios, and of how many out of `count`, unless there are all."""
    if not values:
        return "-"
    text = f"{geometric_mean(values):.2f}x"
    return text if len(values) == count else f"{text} ({len(values)} of {count})"


def reasons(results: Sequence[Result], name: Callable[[Result], str]) -> list[str]:
    """One note per reason for which peers have no time, with the results it concerns."""
    concerned: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for record in result["peers"]:
            if not is_measured(record):
                key = (record["label"], record["status"], record.get("reason", "no reason given"))
                concerned.setdefault(key, []).append(name(result))
    return [
        f"{label}: {status}"
        + ("" if len(names) == len(results) else f" on {', '.join(names)}")
        + f": {reason}."
        for (label, status, reason), names in concerned.items()
    ]


def peers_table(
    title: str,
    results: Sequence[Result],
    first: Mapping[str, Callable[[Result], str]],
    text: Callable[[Record | None], str] = speed_cell,
    versus: bool = True,
) -> Table:
    """A row per result and a column per peer; the fastest cell is marked.

    first: the columns before the peers'.
    text: a peer's cell.
    versus: whether the last column compares oxytorch with the fastest peer.
    """
    peers = peer_names(results)
    versus = versus and "oxytorch" in peers
    table = Table(title, [*first, *(label_of(results, peer) for peer in peers)])
    table.header += ["over fastest peer"] * versus
    for result in results:
        records = [peer_record(result, peer) for peer in peers]
        best = fastest([record for record in records if record is not None])
        alone = sum(is_measured(record) for record in records) < 2
        cells = [text(record) for record in records]
        if best is not None and not alone:
            place = records.index(best)
            cells[place] = f"**{cells[place]}**"
        row = [*(column(result) for column in first.values()), *cells]
        table.rows.append([*row, *([over_fastest_other(result)] if versus else [])])
    return table


def tables_by(
    field: str, table: Callable[[Sequence[Result]], Table]
) -> Callable[[Sequence[Result]], list[Table]]:
    """A function of results that makes a table of those that a field says the same of."""
    return lambda results: [table(found) for found in by(results, field).values()]


def by(results: Sequence[Result], field: str) -> dict[Any, list[Result]]:
    """The results by what a field of theirs says, in the order in which that first comes."""
    found: dict[Any, list[Result]] = {}
    for result in results:
        found.setdefault(result[field], []).append(result)
    return found
