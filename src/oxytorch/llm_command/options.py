"""What the verbs of `oxytorch llm` ask alike: precisions, threads, numbers."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..command_line import positive, words
from ..core.whole_file import check_destination
from ..quantization.configs import CONFIGS


@dataclass(frozen=True)
class Precision:
    """How a model is stored and multiplied.

    weights: None keeps bf16.
    activation_dtype: "int8" multiplies in int8, with a scale per row.
    """

    name: str
    weights: str | None = None
    activation_dtype: str | None = None


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("bf16"),
        *(
            Precision(weights if activations is None else f"{weights}-{activations}", *given)
            for given in sorted(CONFIGS, key=lambda given: given[1] is not None)
            for weights, activations in [given]
        ),
    )
}
"""Every precision by the word on the command line: weights, then activations if not bf16."""


GROUP_SIZE = 128
"""Neighbouring weights that share a scale, where no option says another number."""


def precision(text: str, also: str | None = None) -> Precision:
    """The precision of a word; raises ArgumentTypeError with the choices, `also` among them."""
    if text not in PRECISIONS:
        choices = ", ".join(PRECISIONS if also is None else (also, *PRECISIONS))
        raise argparse.ArgumentTypeError(f"unknown precision {text!r}; choices: {choices}")
    return PRECISIONS[text]


def precisions(text: str) -> tuple[Precision, ...]:
    """The precisions of words separated by commas."""
    return tuple(precision(word) for word in words(text))


def text_of(path: Path, option: str) -> str:
    """What a file says; raises ValueError, which names both, where it holds no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path} is not UTF-8 text (byte {error.start})") from error


def output_file(text: str) -> Path:
    """The path of a file to be written; raises ArgumentTypeError where that cannot be done."""
    path = Path(text)
    try:
        check_destination(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


def add_verb(
    verbs: Any, name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Adds a verb of `oxytorch llm`, whose help shows both texts as they are written."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_count(
    parser: argparse._ActionsContainer, name: str, default: int, help: str, unit: str = "N"
) -> None:
    """An option that is a positive integer; its help shows the default."""
    text = f"{help} (default: {default})"
    parser.add_argument(name, type=positive, default=default, metavar=unit, help=text)


def add_tokenizer(parser: argparse._ActionsContainer) -> None:
    """Where the tokenizer of a model is, which its file does not hold."""
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer (default: MODEL)"
    )


def add_group_size(parser: argparse.ArgumentParser) -> None:
    """How many weights share a scale."""
    text = "neighbouring weights that share a scale, in int4 and nf4"
    add_count(parser, "--group-size", GROUP_SIZE, text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How the model is stored: cache, groups, threads."""
    parser.add_argument(
        "--kv-cache",
        choices=("bf16", "int8"),
        default="bf16",
        help="format of keys and values (default: bf16)",
    )
    add_group_size(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="threads (default: torch's)")
