"""Every example says what it shows and how to run it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
HELPERS = {"training_turns.py", "small_checkpoint.py", "server_process.py"}
PROGRAMS = sorted(
    path for path in [*FOLDER.glob("*.py"), *FOLDER.glob("migration/*.py")]
    if path.name not in HELPERS
)  # fmt: skip


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_docstring_says_what_it_shows(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None and len(text) > 60


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_tells_how_to_run_it(path: Path) -> None:
    before = ["-m", "oxytorch.compat"] if path.name == "before.py" else []
    done = subprocess.run(
        [sys.executable, *before, str(path), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    if path.parent == FOLDER and path.name != "tune_int8.py":
        assert f"python examples/{path.name}" in done.stdout
