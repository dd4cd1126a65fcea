"""Weights that are parts of one joined weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ops.panels import PanelWeight


def whole_of(parts: Sequence[PanelWeight], gated: bool = False) -> PanelWeight | None:
    """Return the weight whose parts these are, in this order, over their memory.

    gated: the two parts' panels alternate (`PanelWeight.gated`). None where they are not side by
    side in one weight.
    """
    first = parts[0].place
    if first is None or len(parts) < 2 or first[0].is_gated != gated:
        return None
    whole = first[0]
    if _run(parts) < len(parts):
        return None
    begin, end = first[1], first[1] + sum(part.shape[0] for part in parts)
    return whole if (begin, end) == (0, whole.shape[0]) else whole.part(begin, end)


def _run(parts: Sequence[PanelWeight]) -> int:
    """How many of the first weights lie side by side in one."""
    count, end = 0, None
    for part in parts:
        place = part.place
        if place is None or place[2] - place[1] != part.shape[0]:
            break
        if count and (place[1] != end or place[0] is not parts[0].place[0]):  # type: ignore[index]
            break
        count, end = count + 1, place[2]
    return count


def joined_groups(
    weights: Iterable[PanelWeight],
) -> list[tuple[PanelWeight, list[PanelWeight]]]:
    """Return (whole, parts in order) for all weights that are parts of a joined one."""
    members: dict[int, list[tuple[int, PanelWeight]]] = {}
    for weight in weights:
        if weight.place is not None:
            whole, begin, _ = weight.place
            members.setdefault(id(whole), []).append((begin, weight))
    groups = []
    for found in members.values():
        left = [weight for _, weight in sorted(found, key=lambda pair: pair[0])]
        while left:
            count = max(1, _run(left))
            parts, left = left[:count], left[count:]
            assert parts[0].place is not None
            joined = whole_of(parts, parts[0].place[0].is_gated)
            if joined is not None:
                groups.append((joined, parts))
    return groups
