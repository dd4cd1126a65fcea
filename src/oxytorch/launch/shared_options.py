"""Options that `oxytorch run` and `oxytorch tune` have in common, and readers of their values."""

from __future__ import annotations

import argparse
from typing import Any

from ..command_line import checked
from ..core.system_files import numbers


def set_texts(parser: argparse.ArgumentParser, usage: str, description: str, epilog: str) -> None:
    """Gives the parser its texts. The script and its own arguments become `program`."""
    parser.usage, parser.description, parser.epilog = usage, description, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def switch(group: Any, *names: str, help: str) -> None:
    """Adds an option without a value."""
    group.add_argument(*names, action="store_true", help=help)


def add_core_options(group: Any) -> None:
    """Adds which cores are used."""
    group.add_argument("--nodes-list", type=cpu_list, metavar="LIST", help="NUMA nodes: 0,2-3")
    group.add_argument(
        "--cores-list", type=cpu_list, metavar="LIST", help="cores, by Linux's numbers: 0-7,16"
    )
    switch(group, "--use-e-cores", help="efficiency cores too")


def add_model_options(group: Any) -> None:
    """Adds how models of the script are optimized."""
    switch(
        group,
        "--optimize",
        help="optimize each model in evaluation mode at its first call without gradients",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="with --optimize: convert its weights (they keep their dtype)",
    )
    switch(
        group,
        "--sample-first-call",
        help="with --optimize: run it again on the inputs of that call, to fuse operators",
    )


def cpu_list(text: str) -> tuple[int, ...]:
    """Numbers of cores or nodes, as Linux writes lists of them."""
    found = tuple(checked(numbers)(text))
    if not found:
        raise argparse.ArgumentTypeError("expected at least one number")
    return found
