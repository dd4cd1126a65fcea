"""The `oxytorch tune` subcommand: what `tune=True` has learnt about this machine."""

from __future__ import annotations

import argparse

from . import learnt

_EXAMPLE = """\
Learn with a model of your own, on an idle machine:

  oxytorch.optimize(model, sample_input=x, tune=True)

Later processes on this machine then choose from the times that were taken, and take none for
layers of those sizes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description = (
        "Prints how many times of layers `tune=True` has kept, for which machines, and where."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    parser.add_argument("--forget", action="store_true", help="remove all times that are kept")


def run(arguments: argparse.Namespace) -> int:
    """Prints or removes what is kept."""
    if arguments.forget:
        count = learnt.forget()
        print(f"removed {count} file{'' if count == 1 else 's'} of times")
        return 0
    found = learnt.kept()
    if not found:
        print("nothing is kept yet\n\n" + _EXAMPLE, end="")
        return 0
    for each in found:
        taken = "1 time of a layer" if each["times"] == 1 else f"{each['times']} times of layers"
        print(each["path"])
        print(f"  {taken}, {'used' if each['serves'] else 'not used'} here")
        for name, value in each["machine"].items():
            if name != "library":
                print(f"  {name:<10} {value}")
    print("`oxytorch tune --forget` removes them")
    return 0
