"""Plots: speed-up of models; ops and optimizers next to the limit; curves of trainings; llms."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.rounds import geometric_mean
from oxytorch.benchmark.report.pages import DTYPES, Run, merge
from oxytorch.benchmark.report.tables import (
    Result,
    is_measured,
    label_of,
    peer_names,
    peer_record,
)

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
ROUNDS = "medians of interleaved rounds"
REMARK = f"{ROUNDS}; random weights; × no result, the table says why"
TRAINING_COLORS = ("#9aa3ad", "#4a86c5", "#f0955f", "#8a2c10")
INK = "#2b3036"
FAINT = "#e3e6ea"

SHORT_NAMES = {
    "bert": "BERT-base",
    "distilbert": "DistilBERT",
    "gpt2": "GPT-2 prefill",
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vit": "ViT-base",
    "lstm": "LSTM",
    "dlrm": "DLRM",
}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the newest runs into a file; its suffix (.svg, .png) says in which format.

    Models if there are any, else ops, else optimizers, else trainings.

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
    [kinds] = machines.values()
    kind = next((k for k in DRAWERS if k in kinds and kinds[k]["results"]), None)
    if kind is None:
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
        figure = DRAWERS[kind](plt, kinds[kind])
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date in its metadata, the same results give the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata)
        plt.close(figure)


def machine_line(run: Run, remark: str) -> str:
    """What stands below a plot: machine, version of torch, date, and a remark."""
    machine, versions = run["machine"], run["versions"]
    place = f"{machine['cpu']}, {machine['cores']} cores"
    # What failed has only the kind of device that was asked for.
    devices = {result.get("device") for result in run["results"]} - {None, "cpu", "cuda"}
    if devices:
        place = f"{', '.join(sorted(devices))}; host {place}"
    return f"{place}; torch {versions['torch']}; {run['date'][:10]}; {remark}"


def _color(peer: str, peers: Sequence[str]) -> str:
    if peer in COLORS:
        return COLORS[peer]
    unknown = [name for name in peers if name not in COLORS]
    return OTHER_COLORS[unknown.index(peer) % len(OTHER_COLORS)]


def _draw_models(plt: Any, run: Run) -> Any:
    """A panel per dtype; in it a group of bars per model, rising or falling from eager = 1."""
    dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in run["results"])]
    groups = max(sum(r["dtype"] == d for r in run["results"]) for d in dtypes) + 1
    figure, panels = plt.subplots(
        len(dtypes),
        1,
        figsize=(max(7.0, 1.0 + 1.35 * groups), 3.1 * len(dtypes) + 0.9),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for panel, dtype in zip(panels[:, 0], dtypes, strict=True):
        results = [result for result in run["results"] if result["dtype"] == dtype]
        _draw_speedups(panel, results, handles)
        panel.set_title(f"{dtype}: times as fast as torch eager", loc="left", fontsize=11)
    _set_ratio_axis(panels[0, 0], run["results"])
    order = [peer for peer in COLORS if peer in handles]
    figure.legend(
        [handles[peer] for peer in order],
        [label_of(run["results"], peer) for peer in order],
        loc="outside upper left",
        ncols=len(order),
        frameon=False,
        fontsize=10,
    )
    figure.supxlabel(machine_line(run, REMARK), fontsize=8.5, x=0.01, ha="left", color="#6b7480")
    return figure


def _draw_speedups(panel: Any, results: Sequence[Result], handles: dict[str, Any]) -> None:
    peers = [peer for peer in peer_names(results) if peer != "eager"]
    width = 0.82 / max(1, len(peers))
    names = [SHORT_NAMES.get(result["model"], result["model"]) for result in results]
    for index, peer in enumerate(peers):
        offset = (index - (len(peers) - 1) / 2) * width
        color = _color(peer, peers)
        speedups = []
        for group, result in enumerate(results):
            record = peer_record(result, peer)
            if not is_measured(record):
                panel.text(group + offset, 1.03, "×", ha="center", color=color, fontsize=9)
                continue
            assert record is not None
            speedups.append(record["speedup"]["median"])
            handles[peer] = _bar(panel, group + offset, speedups[-1], width, color, peer)
        if speedups:
            _bar(panel, len(results) + offset, geometric_mean(speedups), width, color, peer)
    panel.axhline(1, color=INK, linewidth=0.9)
    panel.axvspan(len(results) - 0.5, len(results) + 0.5, color="#f4f5f7", zorder=0)
    panel.set_xticks(range(len(results) + 1), [*names, "geometric\nmean"])
    panel.set_xlim(-0.55, len(results) + 0.5)
    clean(panel, "y")


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


def clean(panel: Any, grid_axis: str) -> None:
    """Grid lines along one axis, and no frame."""
    panel.grid(axis=grid_axis, color=FAINT, linewidth=0.8, zorder=0)
    panel.set_axisbelow(True)
    panel.tick_params(length=0)
    for side in ("top", "right", "left" if grid_axis == "y" else "bottom"):
        panel.spines[side].set_visible(False)


def _draw_ops(plt: Any, run: Run) -> Any:
    """Dots per op and dtype: left the fraction of the limit, right the speed-up over eager."""
    panels_wanted: list[tuple[str, str, Callable[[Result], float]]] = []
    sizes = {result["size"] for result in run["results"]}
    if "memory" in sizes:
        title = "beyond the caches: fraction of the machine's limit"
        panels_wanted.append(("memory", title, lambda r: float(r["fraction_of_limit"]["median"])))
    if "cache" in sizes:
        title = "within the caches: times as fast as torch eager"
        panels_wanted.append(("cache", title, lambda r: float(r["speedup"]["median"])))
    peers = peer_names(run["results"])
    rows = list(dict.fromkeys((r["op"], r["dtype"]) for r in run["results"]))
    figure, panels = plt.subplots(
        1,
        len(panels_wanted),
        figsize=(1.8 + 4.6 * len(panels_wanted), 1.3 + 0.27 * len(rows)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for panel, (size, title, value) in zip(panels[0], panels_wanted, strict=True):
        results = [result for result in run["results"] if result["size"] == size]
        _draw_dots(panel, results, rows, peers, value, handles)
        panel.set_title(title, loc="left", fontsize=10.5)
        panel.axvline(1, color=INK, linewidth=0.9, zorder=1)
        if size == "memory":
            panel.set_xlim(left=0)
            panel.xaxis.set_major_formatter(lambda number, position: f"{number:.0%}")
        else:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda number, position: f"{number:g}×")
        clean(panel, "x")
    panels[0][0].set_yticks(range(len(rows)), [f"{op}  {dtype}" for op, dtype in rows])
    panels[0][0].invert_yaxis()
    order = [peer for peer in peers if peer in handles]
    figure.legend(
        [handles[peer] for peer in order],
        [label_of(run["results"], peer) for peer in order],
        loc="outside upper left",
        ncols=len(order),
        frameon=False,
    )
    figure.supxlabel(machine_line(run, ROUNDS), fontsize=8.5, x=0.01, ha="left", color="#6b7480")
    return figure


def _draw_dots(
    panel: Any,
    results: Sequence[Result],
    rows: Sequence[tuple[str, str]],
    peers: Sequence[str],
    value: Callable[[Result], float],
    handles: dict[str, Any],
) -> None:
    """A row per op and dtype, a faint line through it, and a dot per peer."""
    for index in range(0, len(rows), 2):
        panel.axhspan(index - 0.5, index + 0.5, color="#f7f8f9", zorder=0)
    for peer in peers:
        xs, ys = [], []
        for result in results:
            record = peer_record(result, peer)
            if record is not None and is_measured(record):
                xs.append(value(record))
                ys.append(rows.index((result["op"], result["dtype"])))
        if xs:
            ours = peer.startswith("oxytorch")
            handles[peer] = panel.scatter(
                xs,
                ys,
                s=52 if ours else 30,
                color=_color(peer, peers),
                zorder=4 if ours else 3,
                linewidths=0,
            )
    panel.set_ylim(-0.5, len(rows) - 0.5)


def _draw_optim(plt: Any, run: Run) -> Any:
    """A panel per set of tensors: a row per optimizer and format, a dot per contestant."""
    cases = list(dict.fromkeys(result["case"] for result in run["results"]))
    by_case = {
        case: [
            (result, record)
            for result in run["results"]
            for record in result["peers"]
            if result["case"] == case and "format" in record and is_measured(record)
        ]
        for case in cases
    }
    rows = list(
        dict.fromkeys((r["optimizer"], p["format"]) for pairs in by_case.values() for r, p in pairs)
    )
    figure, panels = plt.subplots(
        1,
        len(cases),
        figsize=(2.2 + 4.2 * len(cases), 1.6 + 0.24 * len(rows)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for panel, case in zip(panels[0], cases, strict=True):
        for index in range(0, len(rows), 2):
            panel.axhspan(index - 0.5, index + 0.5, color="#f7f8f9", zorder=0)
        for result, record in by_case[case]:
            row = rows.index((result["optimizer"], record["format"]))
            _draw_step(panel, result, record, row, handles)
        title = next(r["title"] for r in run["results"] if r["case"] == case)
        panel.set_title(f"{title}: ms per step", loc="left", fontsize=10.5)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(plt.NullFormatter())
        panel.set_ylim(-0.5, len(rows) - 0.5)
        clean(panel, "x")
    panels[0][0].set_yticks(range(len(rows)), [f"{name}  {kept}" for name, kept in rows])
    panels[0][0].invert_yaxis()
    labels = {
        **{peer: _label_of_all(run["results"], peer) for peer in COLORS},
        "limit": "least possible",
    }
    order = [peer for peer in labels if peer in handles]
    figure.legend(
        [handles[peer] for peer in order],
        [labels[peer] for peer in order],
        loc="outside upper left",
        ncols=len(order),
        frameon=False,
    )
    figure.supxlabel(machine_line(run, ROUNDS), fontsize=8.5, x=0.01, ha="left", color="#6b7480")
    return figure


def _label_of_all(results: Sequence[Result], peer: str) -> str:
    """What a contestant is called, whatever formats it takes part in."""
    for result in results:
        for record in result["peers"]:
            name, _, kept = record["peer"].partition(" ")
            if name == peer:
                return str(record["label"]).removesuffix(f" {kept}")
    return peer


def _draw_cold_start(plt: Any, run: Run) -> Any:
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
        for part, color, before in zip(parts, TRAINING_COLORS, [0, *marks], strict=False):
            panel.barh(row, part, left=before, color=color, height=0.7)
        panel.text(marks[2], row, f" {marks[2]:.2f} s", va="center", fontsize=9)
    panel.set_yticks(range(len(results)), [result["label"] for result in results])
    panel.invert_yaxis()
    title = "seconds from process start: imports, device and tensors, optimizer and first step"
    panel.set_title(title, loc="left", fontsize=10.5)
    clean(panel, "x")
    remark = f"empty caches; {results[0]['title']}"
    figure.supxlabel(machine_line(run, remark), fontsize=8.5, x=0.01, ha="left", color="#6b7480")
    return figure


def _draw_step(
    panel: Any, result: Result, record: Result, row: int, handles: dict[str, Any]
) -> None:
    """The contestant's dot, and for oxytorch the time of the least traffic at the limit."""
    peer = record["peer"].split(" ")[0]
    milliseconds = record["seconds"]["median"] * 1e3
    ours = peer == "oxytorch"
    handles[peer] = panel.scatter(
        milliseconds, row, s=46 if ours else 26, color=COLORS[peer], zorder=4 if ours else 3
    )
    if ours:
        least = record["bytes"] / result["read_write_bandwidth"]["median"] * 1e3
        handles["limit"] = panel.scatter(least, row, s=70, color=INK, marker="|", zorder=5)


def _draw_training(plt: Any, run: Run) -> Any:
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
        color=FAINT,
        linewidth=0,
        label=f"least to largest seed of {results[0]['way']}",
    )
    for index, result in enumerate(results):
        means = [statistics.fmean(values) for values in _losses_by_step(result)]
        # The curves all but coincide: the later ones are thinner, so that none is hidden.
        line = {"color": TRAINING_COLORS[index % 4], "linewidth": max(1.2, 5 - 1.5 * index)}
        losses.plot(steps, means, label=result["way"], **line)
        if index > 0:
            gaps = [mean - base for mean, base in zip(means, middle, strict=True)]
            differences.plot(steps, gaps, **{**line, "linewidth": 1.5})
    losses.set_title("held-out loss, nats per character", loc="left", fontsize=11)
    differences.set_title(f"difference from {results[0]['way']}", loc="left", fontsize=11)
    for panel in (losses, differences):
        panel.set_xlabel("steps")
        panel.legend(frameon=False, fontsize=9)
        clean(panel, "y")
    remark = f"means of {len(results[0]['seeds'])} seeds"
    figure.supxlabel(machine_line(run, remark), fontsize=8.5, x=0.01, ha="left", color="#6b7480")
    return figure


def _losses_by_step(result: Result) -> list[tuple[float, ...]]:
    """At every evaluation the losses of all seeds."""
    return [*zip(*([loss for _, loss in curve] for curve in result["curves"]), strict=True)]


def _draw_llm(plt: Any, run: Run) -> Any:
    from oxytorch.benchmark.llm.plot import draw_llm

    return draw_llm(plt, run)


DRAWERS = {
    "models": _draw_models,
    "ops": _draw_ops,
    "optim": _draw_optim,
    "gpu-optim": _draw_optim,
    "cold-start": _draw_cold_start,
    "training": _draw_training,
    "llm": _draw_llm,
}
"""Kind of run -> its plot; the first kind of which there are results is drawn."""
