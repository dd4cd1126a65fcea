"""The machine's limits, and what oxytorch itself costs, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.report.tables import Table


def limits_tables(results: Sequence[Result]) -> list[Table]:
    """The latest measurement: median and quartiles."""
    table = Table("Limits of this machine", ["what", "median", "quartiles"])
    for name, value in results[-1].items():
        if isinstance(value, dict):
            unit = "GFLOP/s" if name.startswith("matrix") else "GB/s"
            middle, low, high = (f"{value[key] / 1e9:.1f}" for key in ("median", "low", "high"))
            table.rows.append([name.replace("_", " "), f"{middle} {unit}", f"{low} to {high}"])
    return [table]


def costs_tables(results: Sequence[Result]) -> list[Table]:
    """A row for the import and for each model that was optimized."""
    rows = [_import_row(r) if r["cost"] == "import" else _optimize_row(r) for r in results]
    return [Table("What oxytorch itself costs", ["what", "time", "memory"], rows)]


def _import_row(result: Result) -> list[str]:
    added, low, high = (
        f"{seconds * 1e3:.0f}"
        for seconds in (result["added_seconds"], *result["added_seconds_range"])
    )
    return ["import oxytorch, after import torch", f"{added} ms ({low} to {high})", "-"]


def _optimize_row(result: Result) -> list[str]:
    if "reason" in result:
        return [f"optimize, {result['title']}", "failed", result["reason"]]
    place = "in place" if result["inplace"] else "on a copy"
    return [
        f"optimize {result['title']}, {result['dtype']}, {place}",
        f"{result['seconds']:.2f} s",
        f"at the peak {result['peak_growth_over_model']:.2f} x the model on top of it,"
        f" {result['peak_over_model']:.2f} x in all",
    ]
