"""Notebooks are those of their sources, keep their outputs, and run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import module_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "examples" / "notebooks").glob("*.py"))
SLOW = {"language_model", "quantize_cnn"}

nbformat = pytest.importorskip("nbformat")
for _package in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(_package)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_of(ROOT / "tools" / "write_notebooks.py")


def kept(source: Path) -> Any:
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_there_are_four() -> None:
    assert len(SOURCES) == 4


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_is_that_of_its_source_with_outputs(source: Path, tool: ModuleType) -> None:
    found = kept(source)
    cells = [(cell.cell_type, cell.source) for cell in found.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in tool.read(source).cells], (
        "python tools/write_notebooks.py writes it anew"
    )
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= 4
    assert all(output.output_type in ("stream", "execute_result") for output in outputs)
    # Nothing of the machine that they were written on.
    assert not any("/home/" in str(each) or "/work/" in str(each) for each in outputs)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem)
        for path in SOURCES
    ],
)
def test_notebook_runs(source: Path, tool: ModuleType) -> None:
    if source.stem == "language_model":
        for package in ("transformers", "fastapi", "uvicorn", "openai"):
            pytest.importorskip(package)
    notebook = tool.run(tool.read(source))
    expected = [len(cell.outputs) > 0 for cell in kept(source).cells if cell.cell_type == "code"]
    found = [len(cell.outputs) > 0 for cell in notebook.cells if cell.cell_type == "code"]
    assert found == expected
