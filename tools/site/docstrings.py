"""Griffe extension: docstrings of this package as Markdown.

A docstring lists parameters as `name: what it is`, one after the other. In Markdown that would be
one paragraph, so each becomes an item of a list. Pages that a docstring names become links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str, names: set[str]) -> str:
    """The docstring with each `name:` of `names` that begins a sentence as an item of a list."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
    entry = re.compile(rf"(?:^|(?<=[.;)] ))((?:{one})(?:(?:, | and )(?:{one}))*): ")
    paragraphs = []
    for paragraph in text.split("\n\n"):
        joined = " ".join(line.strip() for line in paragraph.split("\n"))
        if entry.match(joined):
            _, *parts = entry.split(joined)
            pairs = zip(parts[::2], parts[1::2], strict=True)
            paragraph = "\n".join(f"- {_code(name)}: {what.strip()}" for name, what in pairs)
        paragraphs.append(paragraph)
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", "\n\n".join(paragraphs))


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in re.split(r", | and ", names))


class PlainDocstrings(griffe.Extension):
    """Rewrites the docstring of every function and class."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            names = {p.name.lstrip("*") for p in func.parameters} - {"self", "cls"}
            func.docstring.value = as_markdown(func.docstring.value, names)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring:
            names = {name for name, member in cls.members.items() if member.is_attribute}
            init = cls.members.get("__init__")
            if isinstance(init, griffe.Function):
                names |= {p.name.lstrip("*") for p in init.parameters} - {"self"}
            cls.docstring.value = as_markdown(cls.docstring.value, names)
