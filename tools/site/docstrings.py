"""Griffe extension: docstrings of this package as Markdown.

A docstring lists parameters as `name: what it is`, one after the other. In Markdown that would be
one paragraph, so each becomes an item of a list. Pages that a docstring names become links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str, names: set[str]) -> str:
    """The docstring with each `name:` of `names` as an item of a list."""
    one = "|".join(sorted((re.escape(name) for name in names), key=len, reverse=True))
    if names:
        start = re.compile(rf"^((?:{one})(?:(?:, | and )(?:{one}))*): ")
        inside = re.compile(rf"(?<=[.)]) ((?:{one})): (?=[a-zA-Z`\[0-9])")
        lines: list[str] = []
        for line in text.split("\n"):
            lines += inside.sub(r"\n\1: ", line).split("\n") if start.match(line) else [line]
            # A parameter in the middle of the text of another.
            if len(lines) > 1 and not start.match(line) and any(start.match(x) for x in lines[-4:]):
                lines[-1:] = inside.sub(r"\n\1: ", lines[-1]).split("\n")
        text = "\n".join(lines)
        out: list[str] = []
        in_list = False
        for line in text.split("\n"):
            found = start.match(line)
            if found:
                if not in_list and out and out[-1].strip():
                    out.append("")
                in_list = True
                marked = ", ".join(f"`{n}`" for n in re.split(r", | and ", found[1]))
                out.append(f"- {marked}: {line[found.end() :]}")
            elif in_list and line.strip():
                out.append("  " + line.strip())
            else:
                in_list = in_list and bool(line.strip())
                out.append(line)
        text = "\n".join(out)
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", text)


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
