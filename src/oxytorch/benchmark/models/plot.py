"""The plot of `oxytorch bench models`: speed-up over torch eager, model by model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oxytorch.benchmark.core.results import Result, Run, is_measured
from oxytorch.benchmark.core.rounds import geometric_mean
from oxytorch.benchmark.models.tables import DTYPES
from oxytorch.benchmark.report import plots
from oxytorch.benchmark.report.tables import by, label_of, peer_names, peer_record

SHORT_NAMES = {
    "bert": "BERT-base",
    "distilbert": "DistilBERT",
    "gpt2": "GPT-2 prefill",
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "efficientnet": "EfficientNet-B0",
    "regnet": "RegNetY-4GF",
    "convnext": "ConvNeXt-T",
    "vit": "ViT-base",
    "lstm": "LSTM",
    "dlrm": "DLRM",
}


def draw_models(plt: Any, run: Run) -> Any:
    """A panel per dtype; in it a group of bars per model, rising or falling from eager = 1."""
    dtypes = by(run["results"], "dtype")
    groups = max(len(results) for results in dtypes.values()) + 1
    size = (max(7.0, 1.0 + 1.35 * groups), 3.1 * len(dtypes) + 0.9)
    figure, panels = plots.grid_of_panels(plt, len(dtypes), 1, size)
    handles: dict[str, Any] = {}
    for panel, dtype in zip(panels, filter(dtypes.get, DTYPES), strict=True):
        _draw_speedups(panel, dtypes[dtype], handles)
        panel.set_title(f"{dtype}: times as fast as torch eager", loc="left", fontsize=11)
    _set_ratio_axis(panels[0], run["results"])
    plots.legend(
        figure,
        handles,
        {peer: label_of(run["results"], peer) for peer in peer_names(run["results"])},
        fontsize=10,
    )
    plots.caption(figure, run, f"{plots.ROUNDS}; random weights; × no result, the table says why")
    return figure


def _draw_speedups(panel: Any, results: Sequence[Result], handles: dict[str, Any]) -> None:
    peers = [peer for peer in peer_names(results) if peer != "eager"]
    width = 0.82 / max(1, len(peers))
    names = [SHORT_NAMES.get(result["model"], result["model"]) for result in results]
    for index, peer in enumerate(peers):
        offset = (index - (len(peers) - 1) / 2) * width
        color = plots.color_of(peer, peers)
        speedups = []
        for group, result in enumerate(results):
            record = peer_record(result, peer)
            if record is None or not is_measured(record):
                panel.text(group + offset, 1.03, "×", ha="center", color=color, fontsize=9)
                continue
            speedups.append(record["speedup"]["median"])
            handles[peer] = _bar(panel, group + offset, speedups[-1], width, color, peer)
        if speedups:
            _bar(panel, len(results) + offset, geometric_mean(speedups), width, color, peer)
    panel.axhline(1, color=plots.INK, linewidth=0.9)
    panel.axvspan(len(results) - 0.5, len(results) + 0.5, color="#f4f5f7", zorder=0)
    panel.set_xticks(range(len(results) + 1), [*names, "geometric\nmean"])
    panel.set_xlim(-0.55, len(results) + 0.5)
    plots.clean(panel, "y")


def _set_ratio_axis(panel: Any, results: Sequence[Result]) -> None:
    """A logarithmic axis: twice as fast is as far from the line as half as fast."""
    speedups = [
        record["speedup"]["median"]
        for result in results
        for record in result["peers"]
        if is_measured(record)
    ]
    low, high = min([0.9, *speedups]) / 1.2, max([1.2, *speedups]) * 1.2
    panel.set_yscale("log", base=2)
    ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 16) if low < tick < high]
    panel.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    panel.yaxis.minorticks_off()
    panel.set_ylim(low, high)


def _bar(panel: Any, x: float, value: float, width: float, color: str, peer: str) -> Any:
    """A bar between 1 and the value, so that slower hangs below the line."""
    bars = panel.bar(x, value - 1, width * 0.92, bottom=1, color=color, zorder=2)
    if peer == "oxytorch":
        panel.annotate(
            f"{value:.2f}",
            (x, value),
            textcoords="offset points",
            xytext=(0, 2 if value >= 1 else -9),
            ha="center",
            fontsize=8,
            fontweight="bold",
            color=color,
        )
    return bars
