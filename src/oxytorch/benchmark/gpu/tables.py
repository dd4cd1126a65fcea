"""Tables of steps on a GPU and of cold starts."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.report.tables import (
    Result,
    Table,
    fraction_cell,
    is_measured,
    milliseconds,
    reasons,
)


def gpu_optim_table(results: Sequence[Result]) -> Table:
    """Steps on one set of tensors: a row per optimizer and contestant."""
    first = results[0]
    table = Table(
        f"One step on {first['device']}, {first['title']}: {first['parameters'] / 1e6:.0f} M "
        f"parameters in {first['tensors']} tensors",
        [
            "optimizer",
            "contestant",
            "beside the parameter",
            "device",
            "host",
            "times as fast",
            "of a copy's bandwidth",
            "first step",
        ],
    )
    for result in results:
        measured = [record for record in result["peers"] if is_measured(record)]
        best = min(measured, key=lambda record: float(record["seconds"]["median"]), default=None)
        for record in measured:
            device = milliseconds(record["seconds"]["median"])
            speedup = record.get("speedup")
            table.rows.append(
                [
                    result["optimizer"],
                    record["label"],
                    f"{record['state_bytes_per_parameter']:.2f} bytes",
                    f"**{device}**" if record is best else device,
                    milliseconds(record["host_seconds"]["median"]),
                    f"{speedup['median']:.2f}x" if speedup else "-",
                    fraction_cell(record),
                    milliseconds(record["first_step_seconds"]),
                ]
            )
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


def cold_start_table(results: Sequence[Result]) -> Table:
    """From the start of a process to the first step, a row per way."""
    first = results[0]
    table = Table(
        f"Cold start on {first['device']}: AdamW on {first['title']}, {first['tensors']} tensors, "
        "empty caches",
        [
            "way",
            "C compiler",
            "process start to step done",
            "imports",
            "making the optimizer",
            "first step",
            "second step",
        ],
    )
    for result in results:
        if not is_measured(result):
            table.notes.append(f"{result['label']}: {result['status']}: {result['reason']}.")
            continue
        done = result["done_seconds"]
        table.rows.append(
            [
                result["label"],
                "visible" if result["compiler"] else "hidden",
                f"{done['median']:.2f} s ({done['low']:.2f} to {done['high']:.2f})",
                f"{result['imported_seconds']['median']:.2f} s",
                milliseconds(result["making_seconds"]["median"]),
                milliseconds(result["first_step_seconds"]["median"]),
                milliseconds(result["second_step_seconds"]["median"]),
            ]
        )
    return table
