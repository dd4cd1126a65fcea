"""Docstrings of the package: each parameter and field begins a line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import oxytorch

PACKAGE = Path(oxytorch.__file__).parent
ENTRY = re.compile(r"(^|(?<=\. )|(?<=\.\) ))([a-z_]\w*(?:, [a-z_]\w*)*): ")
"""What begins like a parameter's description: a line, or a sentence within one."""

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _parameters(node: Documented) -> set[str]:
    """The parameters of a function; the fields, attributes and parameters of a class."""
    if isinstance(node, ast.ClassDef):
        names = {
            inner.attr if isinstance(inner, ast.Attribute) else inner.id
            for inner in ast.walk(node)
            if isinstance(inner, (ast.Attribute, ast.Name)) and isinstance(inner.ctx, ast.Store)
        }
        methods = [own for own in node.body if isinstance(own, ast.FunctionDef)]
        return names.union(*(_parameters(own) for own in methods if own.name == "__init__"))
    given = node.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _crowded(source: str) -> Iterator[str]:
    """The lines of docstrings in which a parameter's description follows another text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        text, names = ast.get_docstring(node) or "", _parameters(node)
        entries = [
            (match.start(2) > 0, line)
            for line in map(str.strip, text.splitlines())
            for match in ENTRY.finditer(line)
            if names.issuperset(match[2].split(", "))
        ]
        if len(entries) > 1:
            yield from (f"{node.name}: {line}" for follows, line in entries if follows)


def test_crowded_lines_are_found() -> None:
    source = '''
class Size:
    """How large it is.

    width: of a row. height: of a column.
    """

    width: int
    height: int


def area(width, height):
    """The product.

    width: of a row, as a note: says.
    height: of a column. Raises ValueError: never.
    """
'''
    assert [*_crowded(source)] == ["Size: width: of a row. height: of a column."]


def test_each_parameter_begins_a_line() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    found = [f"{p.relative_to(PACKAGE)}: {line}" for p in files for line in _crowded(p.read_text())]
    assert found == []
