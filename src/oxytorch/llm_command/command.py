"""The command line of `oxytorch llm`; each verb is a module of its own."""

from __future__ import annotations

import argparse

from ..command_line import Subcommand, report_errors

DESCRIPTION = """\
Large language models on the CPU, from a local folder in Hugging Face's format.

Weights are packed once, in bf16, int8, int4, nf4 or fp8, and read at the speed of the memory.
Nothing is downloaded, converted to another file or compiled.
"""

EXAMPLES = """\
examples:
  oxytorch llm generate ./model --prompt "Once upon a time"
  oxytorch llm generate ./model --weights int4 --chat --prompt "Why is the sky blue?"
  oxytorch llm bench --shape tinyllama-1.1b            speed of every precision; needs no files
  oxytorch llm bench ./model --weights int4 --peers torch,llama.cpp
  oxytorch llm perplexity ./model --text held_out.txt
"""


VERBS = (
    Subcommand(
        "generate", "oxytorch.llm_command.generate", "continue a prompt, and report the speed"
    ),
    Subcommand(
        "bench", "oxytorch.benchmark.llm.command", "time prefill and decoding next to peers"
    ),
    Subcommand(
        "perplexity", "oxytorch.benchmark.llm.perplexity", "what formats cost in accuracy on a text"
    ),
)
"""Their modules offer `add_parser(subparsers, name, summary)` and `run(arguments) -> int`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its verbs."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.load().add_parser(verbs, verb.name, verb.summary)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; 1 where something failed, 2 for a mistake in the command or the folder."""
    verb = next(verb for verb in VERBS if verb.name == arguments.verb)
    return report_errors(
        f"llm {verb.name}",
        lambda: verb.load().run(arguments),
        dict.fromkeys((ValueError, OSError, MemoryError), 2),
    )
