"""Draws the pictures of docs/pictures: the layers of the package, and one call of a model."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

BANDS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "commands",
        (
            *(("info", ""), ("demo", ""), ("aot", ""), ("llm", ""), ("serve", "")),
            *(("convert", ""), ("tune", ""), ("run", ""), ("ipexrun", ""), ("memory", "")),
            ("bench", ""),
        ),
    ),
    (
        "around",
        (
            ("runtime", "cores"),
            ("launch", "processes"),
            ("serve", "HTTP"),
            ("ray", "machines"),
            ("memory", "allocators"),
            ("compat", "IPEX's names"),
        ),
    ),
    (
        "front",
        (
            ("llm", "language models"),
            ("quantization", "8 and 4 bits"),
            ("optimize", "passes"),
            ("optim", "optimizers"),
        ),
    ),
    (
        "models",
        (
            ("rewriting", "changes, undo, report"),
            ("program", "runs whole graphs"),
            ("graph", "records and recognizes"),
        ),
    ),
    (
        "ops",
        (
            ("ops/*/__init__.py", "function, reference"),
            ("ops/*/cpu.cpp", "checks, allocates"),
            ("ops/*/kernel.cpp", "arithmetic, by level"),
        ),
    ),
    ("core", (("core", "levels, dispatch, packing"), ("gpu", "devices, images, launching"))),
)
"""The layers from top to bottom: name, and what is in them, each with what it is for."""

QUESTIONS = (
    ("Is it plain inference?", "no gradients, autocast, tracing, torch.compile"),
    ("Is the input signature known?", "kinds and dimensions of tensors, constants"),
    ("Are the sources current?", "modules, hooks and attributes are unchanged"),
)
"""What a Forward checks in each call, and what that means."""

INK, PAPER, BOX, LINE = "#1f2933", "#eef2f6", "#ffffff", "#77838f"
WIDTH_OF_A_LETTER = 0.64
"""Of the font's size: more than the average in wide fonts, bold ones among them."""


class Picture:
    """An SVG of `width` x `height` whose text lies on light boxes, whatever the page's colors."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.parts = [f"<title>{escape(title)}</title>"]

    def box(self, x: int, y: int, width: int, height: int, fill: str = BOX) -> None:
        """A rounded rectangle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'fill="{fill}" stroke="{LINE}"/>'
        )

    def text(
        self, x: int, y: int, width: int, words: str, size: int = 13, bold: bool = False
    ) -> None:
        """A line centered at x; ValueError if it may be wider than `width`."""
        if len(words) * size * WIDTH_OF_A_LETTER > width:
            raise ValueError(f"expected {words!r} in size {size} to fit {width} units; shorten it")
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}"{weight} text-anchor="middle" '
            f'fill="{INK}">{escape(words)}</text>'
        )

    def labelled(self, x: int, y: int, width: int, height: int, name: str, note: str = "") -> None:
        """A box with a name and, below it, a note."""
        self.box(x, y, width, height)
        middle, center = x + width // 2, y + height // 2
        self.text(middle, center - 3 if note else center + 5, width, name, bold=True)
        if note:
            self.text(middle, center + 15, width, note, size=12)

    def arrow(self, x: int, y: int, to_x: int, to_y: int, word: str = "") -> None:
        """A straight arrow, with a word above a horizontal one or beside a vertical one."""
        self.parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{LINE}" stroke-width="2" '
            'marker-end="url(#head)"/>'
        )
        if word:
            middle, center = (x + to_x) // 2, (y + to_y) // 2
            if x == to_x:
                middle += 32
            else:
                center -= 18
            self.box(middle - 17, center - 10, 34, 20, fill=PAPER)
            self.text(middle, center + 4, 34, word, size=12)

    def svg(self) -> str:
        """The file's text."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z" fill="{LINE}"/>'
            "</marker></defs>"
        )
        return "\n".join([head, marker, *self.parts, "</svg>"]) + "\n"


def layers() -> str:
    """The packages by layer; each layer imports those below it."""
    step, height, left, width = 80, 58, 120, 940
    picture = Picture(width + 20, step * len(BANDS), "The layers of oxytorch")
    for index, (name, packages) in enumerate(BANDS):
        top = 10 + index * step
        picture.box(10, top, width, height, fill=PAPER)
        picture.text(10 + (left - 10) // 2, top + height // 2 + 5, left - 10, name, bold=True)
        gap = 8
        each = (width - left - gap * len(packages)) // len(packages)
        for place, (package, note) in enumerate(packages):
            x = 10 + left + place * (each + gap)
            picture.labelled(x, top + gap, each, height - 2 * gap, package, note)
        if index + 1 < len(BANDS):
            picture.arrow(10 + width // 2, top + height, 10 + width // 2, top + step)
    return picture.svg()


def call() -> str:
    """One call of a module that `optimize` gave a Forward: the kernel, or the module's own code."""
    step, height, x, width, right = 82, 52, 10, 400, 500
    picture = Picture(right + 200, 6 * step - 10, "One call of an optimized module")
    middle = x + width // 2
    picture.labelled(x, 10, width, height, "module(x)", "PyTorch runs the hooks, then the Forward")
    for index, (question, meaning) in enumerate(QUESTIONS, start=1):
        top = 10 + index * step
        picture.arrow(middle, top - step + height, middle, top, "yes" if index > 1 else "")
        picture.labelled(x, top, width, height, question, meaning)
        picture.arrow(x + width, top + height // 2, right, top + height // 2, "no")
    top = 10 + step
    picture.labelled(
        right, top, 190, 2 * step + height, "the module's own code", "on plain weights"
    )
    for index, (name, note) in enumerate(
        (
            ("op", "checks arguments, allocates, splits the work"),
            ("kernel", "oxytorch's at this machine's level, or oneDNN's"),
        ),
        start=len(QUESTIONS) + 1,
    ):
        top = 10 + index * step
        word = "yes" if index == len(QUESTIONS) + 1 else ""
        picture.arrow(middle, top - step + height, middle, top, word)
        picture.labelled(x, top, width, height, name, note)
    return picture.svg()


PICTURES = {"layers.svg": layers, "call.svg": call}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
