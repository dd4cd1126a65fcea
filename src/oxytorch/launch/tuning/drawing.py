"""The picture of a search: every figure that was measured, by placement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import number, remark
from .search import Goal, Tally, Verdict

MOST_ROWS = 40
WINNER, OTHERS, REFUSED, INK = "#0b7a75", "#8fa3b0", "#d08770", "#22303c"


def draw(
    tallies: Sequence[Tally], goal: Goal, verdict: Verdict, figure: str, title: str, path: Path
) -> None:
    """Draw the best placements first; dots are trials, bars end at their medians."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    rows = [each for each in sorted(tallies, key=goal.order) if each.is_measured()][:MOST_ROWS]
    picture = Picture(figsize=(9, 1.7 + 0.3 * len(rows)), layout="constrained")
    axes = picture.subplots()
    colours = [
        WINNER if each is verdict.winner else REFUSED if remark(each, goal) else OTHERS
        for each in rows
    ]
    places = range(len(rows))
    axes.barh(places, [each.median for each in rows], color=colours, height=0.62)
    most = max(max(each.values) for each in rows)
    for place, each in zip(places, rows, strict=True):
        axes.plot(each.values, [place] * len(each.values), ".", color=INK, markersize=4)
        axes.text(
            max(*each.values, 0) + 0.015 * most, place, number(each.median), va="center", color=INK
        )
    axes.set_yticks(places, [str(each.placement) for each in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    better = "more" if goal.is_maximum else "less"
    axes.set_xlabel(f"{figure} ({better} is better; bars: medians, dots: trials)")
    axes.set_title(title, loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    shown = [(WINNER, "best"), (OTHERS, "others")]
    shown += [(REFUSED, "over a limit")] if REFUSED in colours else []
    picture.legend(
        handles=[Patch(color=colour, label=label) for colour, label in shown],
        loc="outside lower right",
        ncols=len(shown),
        frameon=False,
    )
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    picture.savefig(path, dpi=150, facecolor="white", metadata=metadata)
