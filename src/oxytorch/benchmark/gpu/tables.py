"""Steps on a GPU, and cold starts, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.report.tables import (
    Table,
    fastest,
    fraction_cell,
    milliseconds,
    reasons,
    spread_cell,
    tables_by,
)


def _steps(results: Sequence[Result]) -> Table:
    """A row per optimizer and contestant."""
    first = results[0]
    table = Table(
        f"One step on {first['device']}, {first['title']}: {first['parameters'] / 1e6:.0f} M "
        f"parameters in {first['tensors']} tensors",
        [
            *("optimizer", "contestant", "beside the parameter", "device", "host"),
            *("times as fast", "of a copy's bandwidth", "first step"),
        ],
    )
    for result in results:
        best = fastest(result["peers"])
        for record in filter(is_measured, result["peers"]):
            table.rows.append([result["optimizer"], *_step_cells(record, record is best)])
    rates = [
        result["read_write_bandwidth"]["median"] / 1e12
        for result in results
        if result["read_write_bandwidth"]
    ]
    table.notes = reasons(results, lambda result: str(result["optimizer"]))
    if rates:
        table.notes.append(
            f"A copy within the device's memory, in the same rounds, moved {min(rates):.2f} to "
            f"{max(rates):.2f} TB/s. Device: time between events around steps that all wait in the "
            "queue. Host: time until step() returns on an idle device. Times as fast: than the "
            "first of torch fused, torch foreach and torch-optimi that has the optimizer, in "
            "float32. The first step includes making the optimizer and compiling."
        )
    return table


def _step_cells(record: Record, is_best: bool) -> list[str]:
    device, speedup = milliseconds(record["seconds"]["median"]), record.get("speedup")
    return [
        record["label"],
        f"{record['state_bytes_per_parameter']:.2f} bytes",
        f"**{device}**" if is_best else device,
        milliseconds(record["host_seconds"]["median"]),
        f"{speedup['median']:.2f}x" if speedup else "-",
        fraction_cell(record),
        milliseconds(record["first_step_seconds"]),
    ]


def _cold_starts(results: Sequence[Result]) -> Table:
    """From the start of a process to the first step, a row per way."""
    first = results[0]
    table = Table(
        f"Cold start on {first['device']}: AdamW on {first['title']}, {first['tensors']} tensors, "
        "empty caches",
        [
            *("way", "C compiler", "process start to step done", "imports"),
            *("making the optimizer", "first step", "second step"),
        ],
    )
    for result in results:
        if not is_measured(result):
            table.notes.append(f"{result['label']}: {result['status']}: {result['reason']}.")
            continue
        alone = ("making", "first_step", "second_step")
        table.rows.append(
            [
                result["label"],
                "visible" if result["compiler"] else "hidden",
                spread_cell(result["done_seconds"], " s", digits=2),
                f"{result['imported_seconds']['median']:.2f} s",
                *(milliseconds(result[f"{stage}_seconds"]["median"]) for stage in alone),
            ]
        )
    return table


gpu_optim_tables = tables_by("case", _steps)
"""Steps on each set of tensors."""


cold_start_tables = tables_by("case", _cold_starts)
"""Cold starts with each set of tensors."""
