"""The plot of `oxytorch bench cold-start`."""

from __future__ import annotations

from typing import Any

from oxytorch.benchmark.core.results import Run, is_measured
from oxytorch.benchmark.report import plots


def draw_cold_start(plt: Any, run: Run) -> Any:
    """A bar per way, from the start of the process to the end of the first step, in its parts."""
    results = [result for result in run["results"] if is_measured(result)]
    if not results:
        raise ValueError("bench: no plot of cold starts: none was measured")
    figure, panel = plt.subplots(figsize=(9, 1.5 + 0.34 * len(results)), layout="constrained")
    for row, result in enumerate(results):
        marks = [
            result[f"{stage}_seconds"]["median"] for stage in ("imported", "device_up", "done")
        ]
        parts = [marks[0], marks[1] - marks[0], marks[2] - marks[1]]
        for part, color, before in zip(parts, plots.SERIES_COLORS, [0, *marks], strict=False):
            panel.barh(row, part, left=before, color=color, height=0.7)
        panel.text(marks[2], row, f" {marks[2]:.2f} s", va="center", fontsize=9)
    panel.set_yticks(range(len(results)), [result["label"] for result in results])
    panel.invert_yaxis()
    title = "seconds from process start: imports, device and tensors, optimizer and first step"
    panel.set_title(title, loc="left", fontsize=10.5)
    plots.clean(panel, "x")
    plots.caption(figure, run, f"empty caches; {results[0]['title']}")
    return figure
