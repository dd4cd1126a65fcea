"""Options of the command that a model has no use for."""

from __future__ import annotations

import argparse


def refuse(arguments: argparse.Namespace, whose: str, *names: str) -> None:
    """Raises ValueError for options that this kind of model has no use for."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is an option {whose}, and {arguments.model} has no "
                "use for it; leave it out"
            )
