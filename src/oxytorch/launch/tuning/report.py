"""The outcome of a search for a person."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from ..text import aligned
from .search import Goal, Tally, Verdict, noise, usual_noise
from .trial import Script

NOISY = 0.05
"""A standard deviation, as a part of the figure, that is worth a word."""


def table(tallies: Sequence[Tally], goal: Goal, figure: str) -> list[str]:
    """All placements, the best first."""
    heads = ["placement", figure, "noise", *(limit.figure.what for limit in goal.limits)]
    rows = [[*heads, "trials", ""]]
    for tally in sorted(tallies, key=goal.order):
        if not tally.values and not tally.failure:
            continue
        deviation = noise(tally, tallies) if tally.values else None
        row = [str(tally.placement), number(tally.median) if tally.values else "-"]
        row.append(f"{number(deviation)}" if deviation is not None else "-")
        row += [number(statistics.median(each)) if each else "-" for each in tally.limits]
        rows.append([*row, str(len(tally.values)), remark(tally, goal)])
    return aligned(rows)


def remark(tally: Tally, goal: Goal) -> str:
    """What is wrong with a placement; empty if nothing is."""
    if tally.failure:
        return tally.failure
    over = [
        limit
        for limit, values in zip(goal.limits, tally.limits, strict=True)
        if statistics.median(values) > limit.most
    ]
    return "; ".join(f"over {limit.most:g} {limit.figure.what}" for limit in over)


def conclusion(
    verdict: Verdict, tallies: Sequence[Tally], goal: Goal, figure: str, script: Script
) -> list[str]:
    """The winner, what it gains, and how to start it."""
    winner, best = verdict.winner, verdict.best
    if winner is None:
        if best is None:
            return ["no placement gave a figure; the first failed so:", *_failure(tallies)]
        limits = ", ".join(str(limit) for limit in goal.limits)
        return [f"no placement has {limits}; the nearest is {best.placement}"]
    lines = [f"best: {winner.placement}, {figure} {number(winner.median)}{_gain(winner, tallies)}"]
    others = [tally for tally in verdict.ties if tally is not winner]
    if others:
        names = "; ".join(f"{tally.placement} ({number(tally.median)})" for tally in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"no different beyond noise, and not simpler: {names}{more}")
    usual = usual_noise(tallies)
    if usual is None:
        lines.append("measured once: --repeats tells noise from gain")
    elif usual > NOISY:
        lines.append(
            f"figures of one placement vary by {usual:.0%}: end other programs, have the script "
            "measure for longer, or raise --repeats"
        )
    return [*lines, "", "  " + shlex.join(script.command(winner.placement))]


def _gain(winner: Tally, tallies: Sequence[Tally]) -> str:
    first = tallies[0]
    if winner is first or not first.is_measured() or not first.median:
        return ""
    return f", {winner.median / first.median:.2f} times that of {first.placement}"


def _failure(tallies: Sequence[Tally]) -> list[str]:
    failed = next((tally for tally in tallies if tally.failure), None)
    return [] if failed is None else [f"  {failed.placement}: {failed.failure}"]


def number(value: float) -> str:
    """With four digits, and never more than it needs."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """As a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
