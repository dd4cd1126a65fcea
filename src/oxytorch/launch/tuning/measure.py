"""Latency and throughput of a saved program: the script that `oxytorch tune model.oxy` starts.

python -m oxytorch.launch.tuning.measure model.oxy --seconds 3
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ...files import load
from ...program import ProgramModel
from ...program.model import FixedInput, Input, TensorInput

WARM_UP = 0.5
"""Seconds of calls before any is measured."""
MOST_WAITING = 300.0
"""Seconds that an instance waits for the others."""


def main(words: list[str]) -> int:
    """Measure, and print both figures."""
    parser = argparse.ArgumentParser(prog="oxytorch.launch.tuning.measure")
    add_options(parser)
    parser.add_argument("model", type=Path)
    parser.add_argument("--together", nargs=2, metavar=("FOLDER", "N"))
    arguments = parser.parse_args(words)
    try:
        model = open_program(arguments.model)
        args, kwargs = example(model, arguments.input)
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    with torch.inference_mode():
        _calls(model, args, kwargs, WARM_UP)
        if arguments.together:
            folder, count = arguments.together
            _meet(Path(folder), int(count))
        times = _calls(model, args, kwargs, arguments.seconds)
        if arguments.together:  # as busy as before, while slower ones finish their last call
            _calls(model, args, kwargs, max(times))
    print(f"throughput: {len(times) / sum(times):.4g} calls a second")
    print(f"latency: {1e3 * statistics.median(times):.4g} ms")
    return 0


def add_options(parser: Any) -> None:
    """Gives a parser the options that `oxytorch tune` hands on."""
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=3.0,
        metavar="S",
        help="model.oxy: how long each instance is measured (3)",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="'NAME: SIZES'",
        help="model.oxy: sizes of an input that has no fixed ones, as 'ids: 1,128'; repeatable",
    )


def open_program(path: Path) -> ProgramModel:
    """The program of a file; raises ValueError for others."""
    model = load(path)
    if not isinstance(model, ProgramModel):
        raise ValueError(
            f"{path}: expected a program, got a {type(model).__name__}; tune a script that runs "
            "it and prints a figure"
        )
    return model


def example(model: ProgramModel, given: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call: normal values, ones for integers and booleans.

    given: sizes of inputs, each as 'NAME: SIZES'. Raises ValueError where sizes are missing or
    do not fit.
    """
    sizes = dict(_sizes(text) for text in given)
    inputs = model.interface.inputs
    known = [each.name for each in inputs if not isinstance(each, FixedInput)]
    for name in sizes:
        if name not in known:
            raise ValueError(f"--input: expected an input of {', '.join(known)}, got {name!r}")
    leaves = [_value(each, sizes.get(each.name)) for each in inputs]
    args, kwargs = model.interface.arguments.build(iter(leaves))
    return list(args), dict(kwargs)


def _value(wanted: Input, sizes: list[int] | None) -> Any:
    if isinstance(wanted, FixedInput):
        return wanted.value
    if not isinstance(wanted, TensorInput):
        if sizes is None or len(sizes) != 1:
            raise ValueError(f"--input: expected a number for {wanted.name}: '{wanted.name}: 8'")
        return sizes[0]
    shape = wanted.shape
    if sizes is None and None in shape:
        shown = ",".join("N" if size is None else str(size) for size in shape)
        raise ValueError(
            f"--input: expected sizes for {wanted.name}, which has no fixed ones: "
            f"--input '{wanted.name}: {shown}' with a number for each N"
        )
    sizes = [size or 0 for size in shape] if sizes is None else sizes
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        return torch.randn(sizes, dtype=torch.float32, device="cpu").to(wanted.dtype)
    return torch.ones(sizes, dtype=wanted.dtype, device="cpu")


def _sizes(text: str) -> tuple[str, list[int]]:
    found = re.fullmatch(r"\s*(.*\S)\s*:\s*(\d+(?:\s*[,x]\s*\d+)*)\s*", text)
    if found is None:
        raise ValueError(f"--input: expected NAME: SIZES, such as 'ids: 1,128', got {text!r}")
    return found[1], [int(size) for size in re.split(r"[,x]", found[2])]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _calls(model: ProgramModel, args: Any, kwargs: Any, seconds: float) -> list[float]:
    """The seconds of each call, for so long and once at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    now = 0.0
    while now < end:
        begin = time.perf_counter()
        model(*args, **kwargs)
        now = time.perf_counter()
        times.append(now - begin)
    return times


def _meet(folder: Path, count: int) -> None:
    """Return when so many processes are here."""
    marks = folder / "here"
    marks.mkdir(exist_ok=True)
    (marks / str(os.getpid())).touch()
    end = time.monotonic() + MOST_WAITING
    while len([*marks.iterdir()]) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"expected {count} instances to be ready, {MOST_WAITING:g} s long")
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
