"""The plot of `oxytorch bench ops`: each op next to the limit, and next to torch eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oxytorch.benchmark.core.results import Record, Result, Run, is_measured
from oxytorch.benchmark.report import plots
from oxytorch.benchmark.report.tables import by, label_of, peer_names, peer_record

_VALUES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "memory": (
        "beyond the caches: fraction of the machine's limit",
        lambda record: float(record["fraction_of_limit"]["median"]),
    ),
    "cache": (
        "within the caches: times as fast as torch eager",
        lambda record: float(record["speedup"]["median"]),
    ),
}
"""Size -> title of its panel, and what stands there."""


def draw_ops(plt: Any, run: Run) -> Any:
    """Dots per op and dtype: left the fraction of the limit, right the speed-up over eager."""
    sizes = by(run["results"], "size")
    wanted = [size for size in _VALUES if size in sizes]
    rows = list(dict.fromkeys((r["op"], r["dtype"]) for r in run["results"]))
    peers = peer_names(run["results"])
    area = (1.8 + 4.6 * len(wanted), 1.3 + 0.27 * len(rows))
    figure, panels = plots.grid_of_panels(plt, 1, len(wanted), area)
    handles: dict[str, Any] = {}
    for panel, size in zip(panels, wanted, strict=True):
        title, value = _VALUES[size]
        plots.stripe(panel, len(rows))
        for peer in peers:
            _draw_dots(panel, sizes[size], rows, peer, value, plots.color_of(peer, peers), handles)
        panel.set_title(title, loc="left", fontsize=10.5)
        panel.axvline(1, color=plots.INK, linewidth=0.9, zorder=1)
        if size == "memory":
            panel.set_xlim(left=0)
            panel.xaxis.set_major_formatter(lambda number, position: f"{number:.0%}")
        else:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda number, position: f"{number:g}×")
        plots.clean(panel, "x")
    plots.set_rows(panels[0], rows)
    plots.legend(figure, handles, {peer: label_of(run["results"], peer) for peer in peers})
    plots.caption(figure, run, plots.ROUNDS)
    return figure


def _draw_dots(
    panel: Any,
    results: Sequence[Result],
    rows: Sequence[tuple[str, str]],
    peer: str,
    value: Callable[[Record], float],
    color: str,
    handles: dict[str, Any],
) -> None:
    """A peer's dots, in the row of each op and dtype."""
    xs, ys = [], []
    for result in results:
        record = peer_record(result, peer)
        if record is not None and is_measured(record):
            xs.append(value(record))
            ys.append(rows.index((result["op"], result["dtype"])))
    if xs:
        ours = peer.startswith("oxytorch")
        look = {"s": 52, "zorder": 4} if ours else {"s": 30, "zorder": 3}
        handles[peer] = panel.scatter(xs, ys, color=color, linewidths=0, **look)
