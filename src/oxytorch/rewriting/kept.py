"""What `tune=True` has learnt about this machine, for a person: shown and forgotten."""

from __future__ import annotations

from . import learnt

EXAMPLE = """\
Learn with a model of your own, on an idle machine:

  oxytorch.optimize(model, sample_input=x, tune=True)

Later processes on this machine then choose from the times that were taken, and take none for
layers of those sizes.
"""


def forget() -> None:
    """Remove what is kept."""
    count = learnt.forget()
    print(f"removed {count} file{'' if count == 1 else 's'} of times")


def show() -> None:
    """Print what is kept: how many times of layers, for which machines, and where."""
    found = learnt.kept()
    if not found:
        print("nothing is kept yet\n\n" + EXAMPLE, end="")
        return
    for each in found:
        taken = "1 time of a layer" if each["times"] == 1 else f"{each['times']} times of layers"
        print(each["path"])
        print(f"  {taken}, {'used' if each['serves'] else 'not used'} here")
        for name, value in each["machine"].items():
            if name != "library":
                print(f"  {name:<10} {value}")
    print("`oxytorch tune --forget` removes them")
