"""Results of `oxytorch bench ops` as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.report.tables import (
    Table,
    by,
    fraction_cell,
    peers_table,
    reasons,
    spread_cell,
)

_NAMES: dict[str, Callable[[Result], str]] = {
    "op": lambda result: str(result["op"]),
    "dtype": lambda result: str(result["dtype"]),
    "sample": lambda result: str(result["sample"]),
}


def op_tables(results: Sequence[Result]) -> list[Table]:
    """Fractions of the machine's limit beyond the caches, and times within them."""
    sizes = by(results, "size")
    makers = {"memory": _memory_table, "cache": _cache_table}
    return [make(sizes[size]) for size, make in makers.items() if size in sizes]


def _memory_table(results: Sequence[Result]) -> Table:
    columns = {
        **_NAMES,
        "traffic": lambda result: f"{result['bytes'] / 2**20:.0f} MiB",
        "limit": lambda result: spread_cell(result["read_write_bandwidth"], " GB/s", 1e-9),
    }
    title = "Ops beyond the caches: fraction of the machine's limit"
    table = peers_table(title, results, columns, fraction_cell, versus=False)
    table.notes = _reasons(results)
    return table


def _cache_table(results: Sequence[Result]) -> Table:
    table = peers_table("Ops within the caches: time per call", results, _NAMES)
    table.notes = _reasons(results)
    return table


def _reasons(results: Sequence[Result]) -> list[str]:
    return reasons(results, lambda result: f"{result['op']} {result['dtype']}")
