"""The plot of `oxytorch llm bench`: time of the prompt and of a token, format by format."""

from __future__ import annotations

from typing import Any

from oxytorch.benchmark.core.results import Record, Result, Run, is_measured
from oxytorch.benchmark.report import plots

_COLORS = {
    **plots.COLORS,
    "torch": "#9aa3ad",
    "torchao": "#c9a227",
    "llama.cpp": "#63b3a4",
}
_PANELS = (("first", "a prompt of {prompt} tokens, ms"), ("token", "each token after it, ms"))


def draw_llm(plt: Any, run: Run) -> Any:
    """A bar per contestant; a line where plain reads of a token's weights would end."""
    results = [r for r in run["results"] if r["model"] == run["results"][-1]["model"]]
    records = [record for result in results for record in result["peers"] if is_measured(record)]
    places = _places(results)
    figure, panels = plt.subplots(
        1, 2, figsize=(11.0, 1.6 + 0.34 * len(records)), sharey=True, layout="constrained"
    )
    for panel, (field, title) in zip(panels, _PANELS, strict=True):
        for record, place in zip(records, places, strict=True):
            _bar(panel, record, field, place)
        panel.set_title(title.format(prompt=results[0]["prompt"]), loc="left", fontsize=11)
        panel.set_xlim(0, 1.15 * max(record[field]["median"] * 1e3 for record in records))
        plots.clean(panel, "x")
    panels[0].set_yticks(places, [str(record["label"]) for record in records])
    panels[0].invert_yaxis()
    figure.suptitle(str(results[0]["model"]), x=0.01, ha="left", fontsize=12)
    remark = "random weights; | the time of plain reads of the weights"
    plots.caption(figure, run, f"{plots.ROUNDS}; {remark}")
    return figure


def _places(results: list[Result]) -> list[float]:
    """Heights of the bars: a gap before each format."""
    places, height = [], 0.0
    for result in results:
        for record in result["peers"]:
            if is_measured(record):
                places.append(height)
                height += 1.0
        height += 0.6
    return places


def _bar(panel: Any, record: Record, field: str, place: float) -> None:
    ours = str(record["peer"]).startswith("oxytorch")
    color = _COLORS.get("oxytorch" if ours else record["peer"], _COLORS["torch"])
    value = record[field]["median"] * 1e3
    panel.barh(place, value, 0.82, color=color, zorder=2)
    panel.annotate(
        f"{value:.0f}" if value >= 100 else f"{value:.1f}",
        (value, place),
        textcoords="offset points",
        xytext=(3, 0),
        va="center",
        fontsize=8,
        fontweight="bold" if ours else "normal",
        color=color if ours else plots.INK,
    )
    if field == "token" and "limit" in record:
        limit = record["token_bytes"] / record["limit"]["median"] * 1e3
        panel.vlines(limit, place - 0.41, place + 0.41, color=plots.INK, linewidth=1.4, zorder=3)
