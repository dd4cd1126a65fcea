"""Every example says what it shows and how to run it."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from oxytorch import compat

FOLDER = Path(__file__).parents[2] / "examples"
HELPERS = {"training_turns.py", "small_checkpoint.py", "server_process.py"}
PROGRAMS = sorted(
    path for path in [*FOLDER.glob("*.py"), *FOLDER.glob("migration/*.py")]
    if path.name not in HELPERS
)  # fmt: skip


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_says_what_an_example_shows_and_how_to_run_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None and len(text) > 60
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    compat.install()  # for the program that is not migrated yet
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        compat.uninstall()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: " in shown
    if path.name not in ("before.py", "after.py"):
        assert f"python examples/{path.relative_to(FOLDER).as_posix()}" in shown


def test_list_of_examples_is_whole_and_leads_to_files() -> None:
    text = (FOLDER / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all((FOLDER / link).exists() for link in links)
    programs = {path.relative_to(FOLDER).as_posix() for path in PROGRAMS}
    missing = programs - {*links} - {"migration/before.py", "migration/after.py"}
    notebooks = {f"notebooks/{path.name}" for path in FOLDER.glob("notebooks/*.ipynb")}
    assert not missing and notebooks <= {*links}
