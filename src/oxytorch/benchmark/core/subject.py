"""What a subject of `oxytorch bench` is: its options, and the jobs that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from oxytorch.benchmark.core.jobs import Job, Settings
from oxytorch.command_line import words

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Option:
    """An option of one subject.

    Attributes:
        flag: how it is written, such as --only.
        field: of `Settings`, which takes its value.
        keywords: for argparse.
        known: gives the names that it takes; None where its values are no names.
    """

    flag: str
    field: str
    keywords: Mapping[str, Any]
    known: Callable[[], Collection[str]] | None = None

    def check(self, values: Any) -> None:
        """Raises ValueError, with the choices, for a name that does not exist."""
        if self.known is None:
            return
        known = self.known()
        for value in values:
            if value not in known:
                choices = ", ".join(known) or "none"
                raise ValueError(f"bench: {self.flag}: unknown name {value!r}; choices: {choices}")


@dataclass(frozen=True)
class Subject:
    """One WHAT of `oxytorch bench`.

    Attributes:
        name: the word of the command line.
        summary: its line of the help.
        rounds: how many, unless --rounds says otherwise.
        jobs: what there is to measure.
        options: those besides the ones that all subjects have.
        kind: of its results files, see `kinds.py`; empty means the name.
        check: raises ValueError where the machine lacks what the settings need.
    """

    name: str
    summary: str
    rounds: int
    jobs: Callable[[Settings], list[Job]]
    options: tuple[Option, ...] = ()
    kind: str = ""
    check: Callable[[Settings], None] = lambda settings: None


def names(
    flag: str,
    field: str,
    text: str,
    known: Callable[[], Collection[str]],
    default: Collection[str] = (),
) -> Option:
    """An option that takes names."""
    keywords = {"type": words, "default": tuple(default), "metavar": "A,B,...", "help": text}
    return Option(flag, field, keywords, known)


def dtypes(text: str = "precisions (default: float32,bfloat16)", *more: str) -> Option:
    """The option --dtype."""
    return names("--dtype", "dtypes", text, lambda: (*DTYPES, *more), DTYPES)


def peers(text: str, known: Collection[str]) -> Option:
    """The option --peers; all take part unless some are named."""
    return names("--peers", "peers", text, lambda: known, known)
