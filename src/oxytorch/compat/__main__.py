"""`python -m oxytorch.compat script.py`: a program of the predecessor's, unmodified."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .door import install
from .errors import OLD

USAGE = "usage: python -m oxytorch.compat script.py [arguments]\n       ... -m module [arguments]"


def main(words: list[str]) -> int:
    """Runs the script or module with the predecessor's names; its arguments are `sys.argv`."""
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        print(USAGE, file=sys.stdout if words and words != ["-m"] else sys.stderr)
        return 0 if words and words != ["-m"] else 2
    if words[:2] == ["-m", f"{OLD}.cpu.launch"]:  # the launcher, under its older name
        sys.argv = ["oxytorch", "ipexrun", *words[2:]]
        runpy.run_module("oxytorch", run_name="__main__", alter_sys=True)
        return 0
    install()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    if words[0].startswith("-"):
        print(f"oxytorch.compat: takes a script or -m, got {words[0]}\n{USAGE}", file=sys.stderr)
        return 2
    if not Path(words[0]).exists():
        print(f"oxytorch.compat: no such file: {words[0]}", file=sys.stderr)
        return 2
    sys.argv = words
    # As for a script that Python runs: its folder comes first, in place of the current one.
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
