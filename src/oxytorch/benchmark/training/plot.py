"""The plot of trainings: held-out losses, and how they differ from the first way's."""

from __future__ import annotations

import statistics
from typing import Any

from oxytorch.benchmark.core.results import Result, Run
from oxytorch.benchmark.report import plots


def draw_training(plt: Any, run: Run) -> Any:
    """Left the held-out losses; right their differences from the first way, step by step."""
    results = [result for result in run["results"] if result["measure"] == "loss"]
    if not results:
        raise ValueError("bench: no plot of trainings: their losses were not measured")
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    steps = [step for step, _ in results[0]["curves"][0]]
    base = _losses_by_step(results[0])
    middle = [statistics.fmean(values) for values in base]
    differences.fill_between(
        steps,
        [min(values) - mean for values, mean in zip(base, middle, strict=True)],
        [max(values) - mean for values, mean in zip(base, middle, strict=True)],
        color=plots.FAINT,
        linewidth=0,
        label=f"least to largest seed of {results[0]['way']}",
    )
    for index, result in enumerate(results):
        means = [statistics.fmean(values) for values in _losses_by_step(result)]
        # The curves all but coincide: the later ones are thinner, so that none is hidden.
        line = {"color": plots.SERIES_COLORS[index % 4], "linewidth": max(1.2, 5 - 1.5 * index)}
        losses.plot(steps, means, label=result["way"], **line)
        if index > 0:
            gaps = [mean - base for mean, base in zip(means, middle, strict=True)]
            differences.plot(steps, gaps, **{**line, "linewidth": 1.5})
    losses.set_title("held-out loss, nats per character", loc="left", fontsize=11)
    differences.set_title(f"difference from {results[0]['way']}", loc="left", fontsize=11)
    for panel in (losses, differences):
        panel.set_xlabel("steps")
        panel.legend(frameon=False, fontsize=9)
        plots.clean(panel, "y")
    plots.caption(figure, run, f"means of {len(results[0]['seeds'])} seeds")
    return figure


def _losses_by_step(result: Result) -> list[tuple[float, ...]]:
    """At every evaluation the losses of all seeds."""
    return [*zip(*([loss for _, loss in curve] for curve in result["curves"]), strict=True)]
