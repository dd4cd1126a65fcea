"""`python -m oxytorch.benchmark`: the same command as `oxytorch bench`."""

from __future__ import annotations

import argparse
import sys

from oxytorch.benchmark.command import configure, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m oxytorch.benchmark")
    configure(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
