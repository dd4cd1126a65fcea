"""The `oxytorch` command. Each subcommand is a module that is imported when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from . import __version__
from .command_line import Subcommand

COMMANDS = (
    Subcommand("info", "oxytorch.info", "what oxytorch finds and does on this machine"),
    Subcommand("demo", "oxytorch.demo.command", "a real model, stock and optimized, side by side"),
    Subcommand("aot", "oxytorch.aot", "GPU kernels compiled ahead of time"),
    Subcommand(
        "llm", "oxytorch.llm_command.command", "language models: generate, bench, perplexity"
    ),
    Subcommand("serve", "oxytorch.serve.command", "a model over HTTP, language models as OpenAI's"),
    Subcommand(
        "convert", "oxytorch.program.command", "exported programs (.pt2) as files of oxytorch"
    ),
    Subcommand(
        "tune", "oxytorch.launch.tuning.command", "the best instances and cores for a script"
    ),
    Subcommand(
        "run", "oxytorch.launch.command", "a script on cores of its own, or several instances"
    ),
    Subcommand("ipexrun", "oxytorch.compat.ipexrun", "command lines of ipexrun, as `oxytorch run`"),
    Subcommand(
        "memory",
        "oxytorch.memory.command",
        "what a program allocates on a GPU, replayed",
    ),
    Subcommand("bench", "oxytorch.benchmark.command", "measure ops and models next to their peers"),
)
"""Their modules offer `configure(parser)` and `run(arguments) -> int`."""


class Parser(argparse.ArgumentParser):
    """A parser whose subparsers name words that they do not know beside their own usage, where
    argparse has the outermost parser do it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The command line; only the `chosen` subcommand's module is imported."""
    parser = Parser(
        prog="oxytorch",
        description="Makes PyTorch models run faster on the machine you already have.",
        epilog="Start with `oxytorch info`, then see `oxytorch COMMAND --help`.",
    )
    parser.add_argument("--version", action="version", version=f"oxytorch {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary)
        if command.name == chosen:
            command.load().configure(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Without a command it prints the help."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            status = _run(words)
        except SystemExit:  # help was printed, or a usage error
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("oxytorch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output (`| head`) has closed it. Python flushes it once more at its end.
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)
        return 141
    return status


def _run(words: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(chosen)
    arguments = parser.parse_args(words, argparse.Namespace(words=words))
    if arguments.command is None:
        parser.print_help()
        return 0
    command = next(command for command in COMMANDS if command.name == arguments.command)
    status: int = command.load().run(arguments)
    return status


def _let_go(stream: TextIO) -> None:
    """Sends what is left of a stream that nobody reads to nowhere."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
