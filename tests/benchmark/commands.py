"""The command line of `oxytorch bench`, called from here."""

from __future__ import annotations

import argparse

from oxytorch.benchmark import command


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(words)


def run_command(*words: str) -> int:
    return command.run(parse(*words))
