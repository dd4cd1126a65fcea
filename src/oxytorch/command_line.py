"""What the subcommands of `oxytorch` share: their tables, and readers of the values of options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, or a verb of one. module: its functions, imported when they are asked for."""

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """Imports the module."""
        return importlib.import_module(self.module)


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def positive(text: str) -> int:
    """An integer above 0; raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}")
    return int(text)


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose ValueError argparse shows."""

    def read_checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_checked
