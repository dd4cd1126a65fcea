"""Writes examples/notebooks/*.ipynb from the *.py beside them, with outputs.

The sources are scripts in jupytext's percent format, which editors show as notebooks, diffs show as
code, and ruff reads. Needs `pip install jupytext nbclient ipykernel`.

    python tools/write_notebooks.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def read(source: Path) -> Any:
    """The notebook of a script, without outputs; names of cells are the same every time."""
    import jupytext

    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def run(notebook: Any) -> Any:
    """Run the cells in the notebooks' folder, and keep what they print to standard output."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
    return notebook


def main(names: list[str]) -> int:
    import nbformat

    known = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    unknown = {*names} - {*known}
    if unknown:
        print(f"expected names among {', '.join(known)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    for name in names or known:
        target = known[name].with_suffix(".ipynb")
        nbformat.write(run(read(known[name])), target)
        print(f"wrote {target.relative_to(FOLDER.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
