"""Results of trainings as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.report.tables import Table, by, milliseconds


def training_tables(results: Sequence[Result]) -> list[Table]:
    """Times and memory of training steps, and the losses that were reached."""
    measures = by(results, "measure")
    makers = {"step": _step_table, "loss": _loss_table}
    return [make(measures[measure]) for measure, make in makers.items() if measure in measures]


def _step_table(results: Sequence[Result]) -> Table:
    """Time of a training step and bytes per parameter of every way of training."""
    table = Table(
        "Training steps and memory",
        ["way", "step", "over float32", "optimizer", "weights and states", "and gradients"],
        notes=[
            "Bytes are per parameter. A step is the model forward and backward and the optimizer's "
            "step, which also stands alone. Times are medians, ratios those of turns side by side."
        ],
    )
    for result in results:
        kinds = result["bytes_per_parameter"]
        total = sum(kinds.values())
        table.rows.append(
            [
                result["way"],
                milliseconds(result["step_seconds"]["median"]),
                f"{result['speedup']['median']:.2f}x",
                milliseconds(result["optimizer_seconds"]["median"]),
                f"{total - kinds['gradients']:.2f} bytes",
                f"{total:.2f} bytes",
            ]
        )
    return table


def _loss_table(results: Sequence[Result]) -> Table:
    """Final held-out loss of every way of training, next to the spread of the first one's seeds."""
    base = results[0]["losses"]
    low, high = min(base), max(base)
    table = Table(
        "Final held-out loss",
        ["way", "mean", "least to largest", "difference", "within the spread", "checkpoint"],
        notes=[
            f"Nats per character, {len(base)} seeds. The difference is from the mean of "
            f"{results[0]['way']}; within its spread is a mean between its least and largest loss.",
            f"Checkpoint: mean of the stock {results[0]['way']} model after it has loaded the "
            "state_dict of the trained one.",
        ],
    )
    for result in results:
        mean = statistics.fmean(result["losses"])
        table.rows.append(
            [
                result["way"],
                f"{mean:.4f}",
                f"{min(result['losses']):.4f} to {max(result['losses']):.4f}",
                f"{mean - statistics.fmean(base):+.4f}",
                "yes" if low <= mean <= high else "no",
                f"{statistics.fmean(result['plain_losses']):.4f}",
            ]
        )
    return table
