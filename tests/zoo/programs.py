"""How many models of the zoo become one program, and why others do not.

    python -m tests.zoo.programs [--part 1/4]

Prints a line for each model that does not, with the reason, or whose program is wrong; then how
many do.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from checks import CASES, call  # noqa: E402
from forms import assert_alike  # noqa: E402
from report import part  # noqa: E402

import oxytorch  # noqa: E402
from oxytorch.benchmark.programs.runs import why_none  # noqa: E402


def _outcome(name: str) -> str:
    """Why a model is no program, or what is wrong with it; nothing where it is a program."""
    torch.manual_seed(0)
    case = CASES[name]()
    model = case.model.eval()
    optimized = oxytorch.optimize(model, sample_input=case.first, passes=["program"])
    with torch.no_grad():
        expected = call(model, case.first)
        for _ in range(2):
            assert_alike(call(optimized, case.first), expected)
    return why_none(optimized) or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=part, default="1/1", help="I/N: only every Nth model")
    number, count = parser.parse_args().part
    warnings.filterwarnings("ignore")
    names = sorted(CASES)[number - 1 :: count]
    programs = 0
    for name in names:
        try:
            why = _outcome(name)
        except Exception as error:
            why = f"WRONG: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        programs += not why
        if why:
            print(f"{name}: {why}", flush=True)
    print(f"{programs} of {len(names)} models are one program", flush=True)


if __name__ == "__main__":
    main()
