"""Writes a C++ header of the lists of src/oxytorch/program/allowed.py; the build calls it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "oxytorch" / "program" / "allowed.py"


def header() -> str:
    """The header's text."""
    lists = {name: value for name, value in runpy.run_path(str(SOURCE)).items() if name.isupper()}
    lines = [f"// Written by tools/{Path(__file__).name} from program/allowed.py.", "#pragma once"]
    for name, values in lists.items():
        own = "k" + "".join(part.capitalize() for part in name.split("_"))
        words = ", ".join(f'"{value}"' for value in values)
        lines.append(f"inline constexpr std::string_view {own}[] = {{{words}}};")
    lines.insert(2, "#include <string_view>\nnamespace oxytorch {")
    return "\n".join([*lines, "}  // namespace oxytorch", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header(), encoding="utf-8")
