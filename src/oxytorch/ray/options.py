"""Options of `oxytorch serve` as keyword arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..serve.command import configure

LISTENING = ("host", "port", "log_level", "threads", "instances", "listener")
"""Options that Ray decides about, or the plan."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parsed(model: str | Path, given: Mapping[str, Any]) -> argparse.Namespace:
    """The options of a command line that says the same: `max_batch=8` for `--max-batch 8`.

    None stands for an option that is left out, and True for one that takes no value. Raises
    ValueError for options that there are none of, and for wrong values.
    """
    parser = _Parser(prog="oxytorch.ray", allow_abbrev=False)
    configure(parser)
    known = {action.dest for action in parser._actions} - {"model", "help", *LISTENING}
    words = [str(model)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"there is no option {name}; there are {', '.join(sorted(known))}")
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return parser.parse_args(words)
