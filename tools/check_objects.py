"""Rejects object files of kernels that define symbols which another object file may define too.

All that a kernel's object file defines for the linker lies in the namespace of its op and level,
oxytorch::<level>::<op>. Outside of it the linker would take one definition for all: of an inline
function, a template instance or its static variable perhaps the copy compiled for AVX-512, with
which an older processor crashes, or another op's function of the same name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# Letters of `nm`: weak, unique, and every kind of global symbol but the undefined.
_VISIBLE = re.compile(r"[wvuWVA-TX-Z]")


def symbols_outside(listing: str, level: str, op: str) -> list[str]:
    """Symbols of an `nm` listing that other objects may define and that lie outside the op."""
    inside = re.compile(rf"_Z(GV|T[VTIS])?Z*NK?8oxytorch{len(level)}{level}{len(op)}{op}")
    found = []
    for line in listing.splitlines():
        words = line.split()
        if len(words) == 3 and _VISIBLE.fullmatch(words[1]) and not inside.match(words[2]):
            found.append(words[2])
    return found


def main() -> int:
    """Checks every object file named on the command line; its folder has the name of its op."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--level", required=True)
    parser.add_argument("objects", nargs="+", type=Path)
    arguments = parser.parse_args()
    failed = False
    for path in arguments.objects:
        op = path.parent.name
        listing = subprocess.run(
            [arguments.nm, path], check=True, capture_output=True, text=True
        ).stdout
        for symbol in symbols_outside(listing, arguments.level, op):
            failed = True
            print(
                f"{path}: other objects may define symbol {symbol} too; "
                f"move its code into namespace oxytorch::{arguments.level}::{op}",
                file=sys.stderr,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
