"""A small drawing of graphs in layers, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 168, 24
_ACROSS, _DOWN = _WIDTH + 16, _HEIGHT + 22
_MARGIN, _HEAD = 20, 56
_FILLS = {
    "oxytorch": "#c9ecd1",
    "mkldnn": "#cfe2f7",
    "aten": "#eeeeee",
    "size": "#ffffff",
    "changed": "#fff1c2",
    "left": "#f9d5d0",
}
_LEGEND = {
    "changed": "replaced by a pass",
    "oxytorch": "kernel of oxytorch",
    "mkldnn": "oneDNN, packed weight",
    "left": "a pass left it",
    "aten": "operator of torch",
}


@dataclass(frozen=True)
class Box:
    """A node.

    kind: one of `_FILLS`; others are drawn as `aten`.
    more: shown when pointed at.
    """

    text: str
    kind: str
    more: str


@dataclass(frozen=True)
class Column:
    """A graph without cycles: boxes in an order in which arrows point forward."""

    title: str
    boxes: Sequence[Box]
    arrows: Sequence[tuple[int, int]]


def draw(columns: Sequence[Column]) -> str:
    """The graphs side by side."""
    parts: list[str] = []
    left, bottom = _MARGIN, 0
    for column in columns:
        placed = _places(column)
        widest = 1 + max((x for x, _ in placed), default=0)
        parts += _column(column, [(left + x * _ACROSS, _HEAD + y * _DOWN) for x, y in placed], left)
        left += max(int(widest * _ACROSS), 9 * len(column.title)) + 3 * _MARGIN
        bottom = max(bottom, *(_HEAD + (y + 1) * _DOWN for _, y in placed), _HEAD + _DOWN)
    parts += _legend(bottom + _MARGIN)
    width, height = max(left, 5 * (_WIDTH + _MARGIN) + _MARGIN), bottom + 3 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        '<defs><marker id="end" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" '
        'markerHeight="5" orient="auto"><path d="M0 0 6 3 0 6z" fill="#888"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _places(column: Column) -> list[tuple[float, int]]:
    """Across and down, of each box: below all that it takes, and near to it."""
    before: list[list[int]] = [[] for _ in column.boxes]
    after: list[list[int]] = [[] for _ in column.boxes]
    for start, end in column.arrows:
        before[end].append(start)
        after[start].append(end)
    down = [0] * len(column.boxes)
    for box, sources in enumerate(before):
        down[box] = max((down[source] + 1 for source in sources), default=0)
    for box in reversed(range(len(down))):  # what starts a branch stands just above its use
        if not before[box] and after[box]:
            down[box] = min(down[user] for user in after[box]) - 1
    rows: dict[int, list[int]] = {}
    for box, row in enumerate(down):
        rows.setdefault(row, []).append(box)
    across = [0.0] * len(column.boxes)
    for row in sorted(rows):
        wanted = {box: _mean([across[source] for source in before[box]]) for box in rows[row]}
        at = -1.0
        for box in sorted(rows[row], key=lambda box: (wanted[box], box)):
            at = across[box] = max(at + 1, wanted[box])
    return [*zip(across, down, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _column(column: Column, places: Sequence[tuple[float, float]], left: float) -> list[str]:
    parts = [
        f'<text x="{left}" y="30" font-size="15" font-weight="bold">{escape(column.title)}</text>'
    ]
    for start, end in column.arrows:
        way = _way(places[start], places[end])
        parts.append(
            f'<path d="{way}" fill="none" stroke="#999" marker-end="url(#end)"/>',
        )
    for box, (x, y) in zip(column.boxes, places, strict=True):
        parts.append(_box(box, x, y))
    return parts


def _way(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From below a box to the next row, or around the boxes of the rows between."""
    (x0, y0), (x1, y1) = start, end
    if y1 - y0 <= _DOWN:
        x0, x1, y0 = x0 + _WIDTH / 2, x1 + _WIDTH / 2, y0 + _HEIGHT
        middle = (y0 + y1) / 2
        return f"M{x0:.0f} {y0:.0f}C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    x0, x1, y0, y1 = x0 + _WIDTH, x1 + _WIDTH, y0 + _HEIGHT / 2, y1 + _HEIGHT / 2
    side = max(x0, x1) + min(40, 12 + (y1 - y0) / 12)
    return f"M{x0:.0f} {y0:.0f}C{side:.0f} {y0:.0f} {side:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"


def _box(box: Box, x: float, y: float) -> str:
    text = box.text if len(box.text) <= 26 else f"{box.text[:24]}..."
    return (
        f'<g><title>{escape(box.more.strip())}</title><rect x="{x:.0f}" y="{y:.0f}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{_FILLS.get(box.kind, _FILLS["aten"])}" '
        f'stroke="#777"/><text x="{x + _WIDTH / 2:.0f}" y="{y + 16:.0f}" text-anchor="middle">'
        f"{escape(text)}</text></g>"
    )


def _legend(y: float) -> list[str]:
    return [
        _box(Box(words, kind, words), _MARGIN + place * (_WIDTH + _MARGIN), y)
        for place, (kind, words) in enumerate(_LEGEND.items())
    ]
