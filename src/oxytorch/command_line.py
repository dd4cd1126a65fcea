"""What the subcommands of `oxytorch` share: their tables, how errors are told, and readers of the
values of options."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, or a verb of one. module: its functions, imported when they are asked for."""

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """Imports the module."""
        return importlib.import_module(self.module)


def report_errors(
    command: str, act: Callable[[], int], statuses: Mapping[type[Exception], int]
) -> int:
    """The exit status of `act()`. An error of one of these classes is told on standard error.

    statuses: what the command returns for errors of a class; the first that fits counts.
    """
    try:
        status = act()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        raise  # whoever read the output has gone, which `__main__` takes for no error
    except tuple(statuses) as error:
        status = next(status for kind, status in statuses.items() if isinstance(error, kind))
        return fail(command, error, status)


def fail(command: str, message: object, status: int = 2) -> int:
    """Says on standard error why a command ends, and returns its exit status."""
    tell(f"oxytorch {command}: {message}", sys.stderr)
    return status


def tell(text: str, file: TextIO | None = None) -> None:
    """Prints lines of which parts may come from anybody's file."""
    print("\n".join(map(printable, text.split("\n"))), file=file)


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def positive(text: str) -> int:
    """An integer above 0; raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}")
    return int(text)


def printable(text: str) -> str:
    """A line with characters that a terminal would obey, or cannot show, as escapes."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose ValueError argparse shows."""

    def read_checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_checked


_PICTURES = (".svg", ".png")


def why_no_picture(path: Path, extra: str) -> str:
    """Why nothing can be drawn to this file; empty if it can. extra: what brings matplotlib."""
    if path.suffix not in _PICTURES:
        return f"expected a name that ends with {' or '.join(_PICTURES)}, got {path.name}"
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.parent}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"needs matplotlib: pip install 'oxytorch[{extra}]' or matplotlib"
    return ""
