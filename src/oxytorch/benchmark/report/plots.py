"""What the plots of all subjects look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oxytorch.benchmark.core.results import Run

COLORS = {
    "eager": "#9aa3ad",
    "eager_cast": "#c3c9d0",
    "compile": "#8d7fc0",
    "onnxruntime": "#63b3a4",
    "openvino": "#4a86c5",
    "foreach": "#8d7fc0",
    "fused": "#4a86c5",
    "predecessor": "#c99ab4",
    "optimi": "#6aa84f",
    "bitsandbytes": "#9aa3ad",
    "flashoptim": "#c9a227",
    "oxytorch": "#e4572e",
}
OTHER_COLORS = ("#e4572e", "#f0955f", "#b83d1b", "#f7c59f", "#8a2c10", "#d97b66")
SERIES_COLORS = ("#9aa3ad", "#4a86c5", "#f0955f", "#8a2c10")
INK = "#2b3036"
FAINT = "#e3e6ea"
ROUNDS = "medians of interleaved rounds"


def color_of(peer: str, peers: Sequence[str]) -> str:
    """The peer's colour among these peers."""
    if peer in COLORS:
        return COLORS[peer]
    unknown = [name for name in peers if name not in COLORS]
    return OTHER_COLORS[unknown.index(peer) % len(OTHER_COLORS)]


def grid_of_panels(plt: Any, rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure, and its panels one after the other, which share the vertical axis."""
    figure, panels = plt.subplots(
        rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    return figure, panels.flatten()


def stripe(panel: Any, rows: int) -> None:
    """A faint band behind every other row."""
    for index in range(0, rows, 2):
        panel.axhspan(index - 0.5, index + 0.5, color="#f7f8f9", zorder=0)
    panel.set_ylim(-0.5, rows - 0.5)


def set_rows(panel: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Name the rows, the first one on top."""
    panel.set_yticks(range(len(rows)), ["  ".join(row) for row in rows])
    panel.invert_yaxis()


def clean(panel: Any, grid_axis: str) -> None:
    """Grid lines along one axis, and no frame."""
    panel.grid(axis=grid_axis, color=FAINT, linewidth=0.8, zorder=0)
    panel.set_axisbelow(True)
    panel.tick_params(length=0)
    for side in ("top", "right", "left" if grid_axis == "y" else "bottom"):
        panel.spines[side].set_visible(False)


def legend(figure: Any, handles: Mapping[str, Any], labels: Mapping[str, str], **look: Any) -> None:
    """Above the panels, what was drawn, in the order of the labels."""
    drawn = [name for name in labels if name in handles]
    figure.legend(
        [handles[name] for name in drawn],
        [labels[name] for name in drawn],
        loc="outside upper left",
        ncols=len(drawn),
        frameon=False,
        **look,
    )


def caption(figure: Any, run: Run, remark: str) -> None:
    """Below the panels: machine, version of torch, date, and a remark."""
    machine, versions = run["machine"], run["versions"]
    place = f"{machine['cpu']}, {machine['cores']} cores"
    # What failed has only the kind of device that was asked for.
    devices = {result.get("device") for result in run["results"]} - {None, "cpu", "cuda"}
    if devices:
        place = f"{', '.join(sorted(devices))}; host {place}"
    text = f"{place}; torch {versions['torch']}; {run['date'][:10]}; {remark}"
    figure.supxlabel(text, fontsize=8.5, x=0.01, ha="left", color="#6b7480")
