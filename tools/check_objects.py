"""Rejects object files of a level that define symbols which the linker may share between levels.

Such a symbol (weak or unique: an inline function, a template instance, its static variable) outside
namespace oxytorch::<level> would be merged with that of other object files; the linker might keep
the copy compiled for AVX-512 and an older processor would crash.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

SHARED = set("WwVvu")


def shared_symbols(listing: str, level: str) -> list[str]:
    """Symbols of an `nm` listing that are defined, may be shared, and lie outside the level."""
    inside = re.compile(rf"_Z(GV|T[VTIS])?Z*NK?8oxytorch{len(level)}{level}")
    found = []
    for line in listing.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] in SHARED and not inside.match(words[2]):
            found.append(words[2])
    return found


def main() -> int:
    """Checks every object file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--level", required=True)
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    failed = False
    for path in arguments.objects:
        listing = subprocess.run(
            [arguments.nm, path], check=True, capture_output=True, text=True
        ).stdout
        for symbol in shared_symbols(listing, arguments.level):
            failed = True
            print(
                f"{path}: symbol {symbol} is shared between levels; "
                f"move its code into namespace oxytorch::{arguments.level}",
                file=sys.stderr,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
