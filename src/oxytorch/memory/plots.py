"""Pictures of a replay: what was allocated and reserved when, and a map of the peak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import printable
from .offline import lifetimes
from .replay import Range, Result
from .sizes import size
from .trace import Trace

INK = "#22303c"
ALLOCATED, RESERVED, WASTED, FAILED = "#8fb8b5", "#0b7a75", "#f2cdbf", "#b3261e"
KINDS = (
    ("kept to the end", "#2f5d8a"),
    ("long-lived", "#6fa3c7"),
    ("short-lived", "#c4dcea"),
    ("small ones", "#9a8fb5"),
    ("cached, not used", "#e58e73"),
)
KEPT, LONG, SHORT, SMALL, UNUSED = range(5)
LONG_PART = 0.02
"""What lives for more than this part of all events is long-lived."""
ROWS, COLUMNS, MOST_MARKS = 14, 560, 60
_GiB = 1 << 30


def draw(trace: Trace, results: Sequence[Result], title: str, path: Path) -> None:
    """Draw a row for each result: its timeline, and beside it the map at the trace's peak."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context({"svg.hashsalt": "oxytorch", "font.size": 9}):
        height = 1.1 + 2.0 * len(results)
        picture = Figure(figsize=(13, height), layout="constrained")
        grid = picture.subplots(
            len(results), 2, squeeze=False, gridspec_kw={"width_ratios": [1.25, 1]}
        )
        most = max((max(each.peak_reserved, each.peak_allocated) for each in results), default=1)
        kinds = _kinds(trace)
        for (left, right), result in zip(grid, results, strict=True):
            _timeline(left, trace, result, most)
            _map(right, result, most, kinds)
        grid[-1][0].set_xlabel("event (an allocation or a free)", color=INK)
        found = {_kind(each, kinds) for result in results for each in result.ranges}
        shown = [("allocated", ALLOCATED), ("reserved, not allocated", WASTED)]
        shown += [KINDS[kind] for kind in sorted(found)]
        picture.legend(
            handles=[Patch(color=colour, label=label) for label, colour in shown],
            loc="outside lower center",
            ncols=len(shown),
            frameon=False,
        )
        picture.suptitle(
            printable(title), x=0.01, ha="left", color=INK, fontsize=12, parse_math=False
        )
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        picture.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def _timeline(axes: Any, trace: Trace, result: Result, most: int) -> None:
    events = [point.event for point in result.timeline]
    allocated = [point.allocated / _GiB for point in result.timeline]
    reserved = [point.reserved / _GiB for point in result.timeline]
    axes.fill_between(events, reserved, color=WASTED, linewidth=0)
    axes.fill_between(events, allocated, color=ALLOCATED, linewidth=0)
    axes.plot(events, reserved, color=RESERVED, linewidth=1.2)
    marks = [index for index, _ in trace.marks]
    for index in marks if len(marks) <= MOST_MARKS else []:
        axes.axvline(index, color=INK, linewidth=0.4, alpha=0.25)
    if result.failed is not None:
        axes.axvline(result.failed, color=FAILED, linewidth=1.5)
        axes.text(result.failed, most / _GiB, " out of memory", color=FAILED, va="top")
    axes.set_xlim(0, max(1, len(trace)))
    axes.set_ylim(0, 1.08 * most / _GiB)
    axes.set_ylabel("GiB", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_headline(result), loc="left", color=INK, fontsize=10)


def _headline(result: Result) -> str:
    if result.failed is not None:
        return f"{result.allocator}: out of memory at event {result.failed}"
    text = f"{result.allocator}: {size(result.peak_reserved)} reserved"
    text += f", {result.fragmentation:.1%} not used"
    return text + (f", {result.driver_calls} driver calls" if result.calls else "")


def _kinds(trace: Trace) -> list[int]:
    """What each allocation counts as in a map."""
    found = []
    for first, last in lifetimes(trace):
        is_long = last - first > LONG_PART * len(trace)
        found.append(KEPT if last >= len(trace) else LONG if is_long else SHORT)
    return found


def _kind(each: Range, kinds: Sequence[int]) -> int:
    if each.number is None:
        return UNUSED
    return SMALL if each.number < 0 else kinds[each.number]


def _map(axes: Any, result: Result, most: int, kinds: Sequence[int]) -> None:
    """Addresses in rows, each place in the colour of what takes most of it."""
    from matplotlib.colors import ListedColormap

    axes.set_axis_off()
    if not result.ranges:
        text = "pages mapped anywhere: no addresses" if result.failed is None else "not reached"
        axes.text(0.5, 0.5, text, ha="center", va="center", color=INK, transform=axes.transAxes)
        return
    axes.set_axis_on()
    cell = most / (ROWS * COLUMNS)
    shares = [[0.0] * len(KINDS) for _ in range(ROWS * COLUMNS)]
    place = 0.0
    for each in result.ranges:
        _spread(shares, place / cell, (place + each.size) / cell, _kind(each, kinds))
        place += each.size
    cells = [
        max(range(len(KINDS)), key=share.__getitem__) if any(share) else -1 for share in shares
    ]
    rows = [cells[row * COLUMNS : (row + 1) * COLUMNS] for row in range(ROWS)]
    colours = ["#ffffff", *(colour for _, colour in KINDS)]
    axes.imshow(
        rows,
        cmap=ListedColormap(colours),
        vmin=-1.5,
        vmax=len(KINDS) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_xticks([])
    axes.set_yticks([row - 0.5 for row in range(1, ROWS)], [""] * (ROWS - 1))
    axes.grid(axis="y", color="white", linewidth=1.5)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    title = f"addresses at the peak, {size(int(most / ROWS))} a row"
    axes.set_title(title, loc="left", color=INK, fontsize=10)


def _spread(shares: list[list[float]], first: float, last: float, kind: int) -> None:
    index = int(first)
    while index < last and index < len(shares):
        shares[index][kind] += min(last, index + 1) - max(first, index)
        index += 1
