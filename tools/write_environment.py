"""Writes docs/environment.md from the fields of oxytorch.config.Config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from oxytorch.config import Config

TARGET = Path(__file__).parents[1] / "docs" / "environment.md"

HEAD = """# Environment variables

This page lists the environment variables that oxytorch reads. They are read once, when oxytorch is
imported. An empty value means that the variable is not set, except for lists. oxytorch never sets a
variable. `python tools/write_environment.py` writes the page from `src/oxytorch/config.py`, the
only file in the package's core that reads the environment.

| Variable | Meaning |
|---|---|
"""


def page() -> str:
    """The page's text."""
    rows = [
        f"| `{field.metadata['variable']}` | {field.metadata['meaning']} |\n"
        for field in dataclasses.fields(Config)
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(page())
