"""Writes the C++ headers of the rules into a folder; CMake runs it when the library is built."""

from __future__ import annotations

import argparse
from pathlib import Path

from .cpp import headers


def main() -> None:
    """Writes the headers of the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name, text in headers(arguments.rules.read_text()).items():
        (arguments.folder / name).write_text(text)


if __name__ == "__main__":
    main()
