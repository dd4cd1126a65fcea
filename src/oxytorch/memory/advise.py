"""Which setting of torch's allocator serves a traced program best, or whether ours does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .replay import Result, check_arguments, replay
from .sizes import size
from .trace import Trace

SETTINGS = (
    "native-policy",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
)
"""Candidates; with a limit also garbage_collection_threshold:0.8, which does nothing without."""
GARBAGE = "garbage_collection_threshold:0.8"
WORTH = 0.02
"""A setting is worth its line where it saves this part of what is reserved without it."""


@dataclass(frozen=True)
class Advice:
    """What to do, and the numbers that say so.

    setting: of PYTORCH_ALLOC_CONF, "" where torch's defaults serve as well as any.
    ours: whether oxytorch's allocator needs less than every setting by more than WORTH.
    results: of every candidate, and of ours and the offline bound at the end.
    """

    setting: str
    ours: bool
    reasons: list[str]
    results: list[Result]

    @property
    def fits(self) -> bool:
        """Whether any of the candidates, or ours, serves the program within the limit."""
        return any(result.failed is None for result in self.results[:-1])


def advise(trace: Trace, limit: int | None = None) -> Advice:
    """Replay a trace under every candidate and choose.

    A candidate that runs out of memory within `limit` bytes is out; of the others the one that
    reserves least at its peak is chosen, the default where that is within 2 % of it.

    Raises:
        ValueError: a limit that no device has.
        TypeError: an argument of another type.
    """
    check_arguments("advise", trace, limit)
    candidates = [*SETTINGS, *([GARBAGE] if limit is not None else [])]
    found = replay(trace, [*candidates, "oxytorch", "offline-bound"], limit)
    stock, ours = found[: len(candidates)], found[-2]
    fit = [result for result in stock if result.failed is None]
    best = _best(fit)
    is_ours = ours.failed is None and (
        best is None or ours.peak_reserved < best.peak_reserved * (1 - WORTH)
    )
    setting = "" if best is None or best is stock[0] else best.allocator
    return Advice(setting, is_ours, _reasons(stock, best, ours, found[-1], limit), found)


def _best(fit: Sequence[Result]) -> Result | None:
    """The least reserved; what stands further in front where that is nearly the same."""
    if not fit:
        return None
    least = min(result.peak_reserved for result in fit)
    return next(result for result in fit if result.peak_reserved * (1 - WORTH) <= least)


def _reasons(
    stock: Sequence[Result], best: Result | None, ours: Result, bound: Result, limit: int | None
) -> list[str]:
    default = stock[0]
    lines = [
        f"the program needs {size(default.peak_allocated)} at its peak; no allocator that hands "
        f"out pages can do with less than {size(bound.peak_reserved)}"
    ]
    if default.failed is not None and limit is not None:
        lines.append(f"torch's default runs out of {size(limit)}, at event {default.failed}")
    else:
        lines.append(f"torch's default reserves {described(default)}")
    if best is not None and best is not default:
        lines.append(f"PYTORCH_ALLOC_CONF={best.allocator} reserves {described(best)}")
    elif best is None:
        lines.append("none of the settings of PYTORCH_ALLOC_CONF that were tried fits")
    else:
        lines.append("no setting of PYTORCH_ALLOC_CONF that was tried reserves 2 % less")
    if ours.failed is None:
        lines.append(f"oxytorch's allocator reserves {described(ours)}")
    else:
        lines.append(f"oxytorch's allocator runs out of memory too, at event {ours.failed}")
    return lines


def described(result: Result) -> str:
    """What an allocator reserves, what of that is wasted, and what it asks of the driver."""
    return (
        f"{size(result.peak_reserved)}: {result.fragmentation:.1%} of it wasted, "
        f"{result.driver_calls} driver calls"
    )
