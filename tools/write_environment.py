"""Writes docs/environment.md from the fields of oxytorch.config.Config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from oxytorch.config import Config

TARGET = Path(__file__).parents[1] / "docs" / "environment.md"

HEAD = """# Environment variables

Written by `python tools/write_environment.py` from `src/oxytorch/config.py`, the only file of the
package's core that reads the environment. Variables are read once, when oxytorch is imported; an
empty value counts as unset, but for lists. oxytorch never writes one.

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
