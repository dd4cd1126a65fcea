"""What scripts outside of the package import of it exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "tools")
SCRIPTS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
EXTRAS = {"oxytorch.ray": "pyarrow"}
"""Packages of ours that import others, which need not be installed."""


def _is_installed(module: str) -> bool:
    return all(
        importlib.util.find_spec(needs)
        for ours, needs in EXTRAS.items()
        if module == ours or module.startswith(f"{ours}.")
    )


def _exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_are_imported_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oxytorch")
        if isinstance(node, ast.ImportFrom) and is_ours and node.module is not None:
            for each in node.names:
                module = f"{node.module}.{each.name}"
                if _is_installed(node.module) and _is_installed(module):
                    assert _exists(node.module, each.name), f"{node.module} has no {each.name}"
