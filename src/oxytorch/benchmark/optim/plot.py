"""The plot of `oxytorch bench optim` and `gpu-optim`: steps next to the least possible time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oxytorch.benchmark.core.results import Record, Result, Run, is_measured
from oxytorch.benchmark.report import plots
from oxytorch.benchmark.report.tables import by


def draw_optim(plt: Any, run: Run) -> Any:
    """A panel per set of tensors: a row per optimizer and format, a dot per contestant."""
    cases = by(run["results"], "case")
    rows = list(dict.fromkeys(_row(*pair) for of in cases.values() for pair in _pairs(of)))
    area = (2.2 + 4.2 * len(cases), 1.6 + 0.24 * len(rows))
    figure, panels = plots.grid_of_panels(plt, 1, len(cases), area)
    handles: dict[str, Any] = {}
    for panel, results in zip(panels, cases.values(), strict=True):
        plots.stripe(panel, len(rows))
        for result, record in _pairs(results):
            _draw_step(panel, result, record, rows.index(_row(result, record)), handles)
        panel.set_title(f"{results[0]['title']}: ms per step", loc="left", fontsize=10.5)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(plt.NullFormatter())
        plots.clean(panel, "x")
    plots.set_rows(panels[0], rows)
    labels = {peer: _label_of_all(run["results"], peer) for peer in plots.COLORS}
    plots.legend(figure, handles, {**labels, "limit": "least possible"})
    plots.caption(figure, run, plots.ROUNDS)
    return figure


def _pairs(results: Sequence[Result]) -> list[tuple[Result, Record]]:
    """Every record that has times, with its result."""
    return [
        (result, record)
        for result in results
        for record in result["peers"]
        if "format" in record and is_measured(record)
    ]


def _row(result: Result, record: Record) -> tuple[str, str]:
    return result["optimizer"], record["format"]


def _label_of_all(results: Sequence[Result], peer: str) -> str:
    """What a contestant is called, whatever formats it takes part in."""
    for result in results:
        for record in result["peers"]:
            name, _, kept = record["peer"].partition(" ")
            if name == peer:
                return str(record["label"]).removesuffix(f" {kept}")
    return peer


def _draw_step(
    panel: Any, result: Result, record: Record, row: int, handles: dict[str, Any]
) -> None:
    """The contestant's dot, and for oxytorch the time of the least traffic at the limit."""
    peer = record["peer"].split(" ")[0]
    milliseconds = record["seconds"]["median"] * 1e3
    ours = peer == "oxytorch"
    handles[peer] = panel.scatter(
        milliseconds, row, s=46 if ours else 26, color=plots.COLORS[peer], zorder=4 if ours else 3
    )
    if ours:
        least = record["bytes"] / result["read_write_bandwidth"]["median"] * 1e3
        handles["limit"] = panel.scatter(least, row, s=70, color=plots.INK, marker="|", zorder=5)
