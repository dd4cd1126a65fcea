"""Draws the plot of the newest runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.results import Run
from oxytorch.benchmark.kinds import KINDS
from oxytorch.benchmark.report.pages import merge
from oxytorch.benchmark.report.plots import INK


def draw_if_possible(runs: Sequence[Run], path: Path) -> bool:
    """As `draw`; without matplotlib, say so on standard error and return False."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"oxytorch bench: {path} not drawn: matplotlib is not installed "
            f"(pip install 'oxytorch[bench]')",
            file=sys.stderr,
        )
        return False
    draw(runs, path)
    return True


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the newest runs into a file; its suffix (.svg, .png) says in which format.

    Of several kinds of runs the first one of `KINDS` that has a plot.

    Raises:
        ValueError: none of these were measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = merge(runs)
    if len(machines) > 1:
        places = "; ".join(machines)
        raise ValueError(f"bench: {path}: expected results of one machine and torch, got {places}")
    [found] = machines.values()
    draws = {name: kind.draw for name, kind in KINDS.items() if kind.draw is not None}
    chosen = next((name for name in draws if name in found and found[name]["results"]), None)
    if chosen is None:
        raise ValueError(f"bench: {path} not drawn: the results hold nothing that has a plot")
    style: dict[Any, Any] = {
        "font.size": 10,
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#b8bec5",
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.hashsalt": "oxytorch",
    }
    with plt.rc_context(style):
        figure = draws[chosen](plt, found[chosen])
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date in its metadata, the same results give the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata)
        plt.close(figure)
