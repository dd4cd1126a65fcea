"""Draws the errors of layers."""

from __future__ import annotations

import math
from pathlib import Path

from .errors import MOST_BARS, ErrorReport, decibels

INK = "#1f2933"
LEAST = -20.0
"""Decibels of the shortest bar: what is worse is drawn as long."""
COLORS = {"static": "#2f6db5", "dynamic": "#d98a1f"}


def draw(report: ErrorReport, path: str | Path) -> None:
    """See `ErrorReport.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "report.plot: expected matplotlib to be installed; pip install matplotlib, or read "
            "print(report)"
        ) from error
    found = [layer for layer in report.layers if layer.sqnr is not None and layer.sqnr < math.inf]
    layers = found[:MOST_BARS]
    if not layers:
        raise ValueError("report.plot: expected a layer with an error, got none")
    figure = Figure(figsize=(9, 1.6 + 0.22 * len(layers)), layout="constrained")
    axes = figure.subplots()
    places = range(len(layers))
    axes.barh(
        places,
        [max(layer.sqnr or 0.0, LEAST) for layer in layers],
        color=[COLORS[layer.compute] for layer in layers],
        height=0.7,
    )
    inputs = [(at, each.input_sqnr) for at, each in enumerate(layers)]
    dots = [(at, value) for at, value in inputs if value is not None and LEAST <= value < math.inf]
    axes.plot([value for _, value in dots], [at for at, _ in dots], "o", color=INK, markersize=3)
    axes.set_yticks(places, [layer.module for layer in layers], fontsize=8)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlabel("SQNR in dB: of what a layer gives (bars), of what it takes (dots)")
    axes.grid(axis="x", color="#d5dae0", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = "" if len(layers) == len(found) else f", {len(layers)} worst layers"
    axes.set_title(
        f"{report.model}: {decibels(report.sqnr)} as a whole, {report.int8_share:.0%} in 8-bit "
        f"integers{shown}",
        fontsize=10,
        loc="left",
        color=INK,
    )
    used = {layer.compute for layer in layers}
    if len(used) > 1:
        handles = [Patch(color=COLORS[each], label=each) for each in sorted(used)]
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, facecolor="white")
