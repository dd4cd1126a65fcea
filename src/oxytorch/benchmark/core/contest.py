"""The rules that all contestants share: who takes part, correct outputs, reasons."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oxytorch.benchmark.core.results import Record, Status
from oxytorch.benchmark.core.rounds import paired_ratio, spread

STOCK = ("eager", "eager_cast")
"""Plain PyTorch: its own error in a dtype is the yardstick for everybody else's."""

LEAST_ALLOWED = {
    torch.float32: 2.5e-4,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
    torch.int8: 0.4,  # random weights make much of each rounding
}
"""Relative difference that is always allowed; else twice that of plain PyTorch in the dtype."""

Progress = Callable[[str, str], None]
"""(peer, stage): called before each stage, so that a crash can be laid at a peer's door."""


class Absent(Exception):
    """A peer that cannot take part; the text is the reason, for the table."""


def require(module: str, remedy: str = "pip install 'oxytorch[bench]'") -> Any:
    """The imported module; raises `Absent` with the remedy where it is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise Absent(f"{module.partition('.')[0]} is not installed ({remedy})")
    return importlib.import_module(module)


def no_progress(peer: str, stage: str) -> None:
    """A `Progress` that nobody watches."""


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def new_record(peer: str, label: str) -> Record:
    """The record of a peer that has not shown anything yet."""
    return {"peer": peer, "label": label, "status": "failed", "notes": {}}


def refuse(record: Record, status: Status, reason: str) -> None:
    """Note that a peer has no speed, and why."""
    record["status"] = status
    record["reason"] = reason


def refuse_for(record: Record, error: Exception) -> None:
    """Note that a peer is absent, or that it failed, by the error it raised."""
    if isinstance(error, Absent):
        refuse(record, "absent", str(error))
    else:
        refuse(record, "failed", first_line(error))


def add_times(record: Record, values: list[float], base: Sequence[float] | None = None) -> None:
    """Note a peer's seconds in each round, and how they compare with those of the base."""
    record["rounds"] = values
    record["seconds"] = spread(values)
    if base is not None:
        record["speedup"] = paired_ratio(base, values)


def largest_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest |output - expected| relative to the largest |expected|, over all tensors.

    Infinite for a missing tensor, another shape or a value that is not finite.
    """
    if len(outputs) != len(expected):
        return float("inf")
    largest = 0.0
    for output, reference in zip(outputs, expected, strict=True):
        if output.shape != reference.shape or not bool(output.isfinite().all()):
            return float("inf")
        if reference.numel() == 0:
            continue
        scale = float(reference.abs().max())
        difference = float((output.float() - reference.float()).abs().max())
        largest = max(largest, difference / scale if scale > 0 else difference)
    return largest


def judge(records: Sequence[Record], dtype: torch.dtype, own_error: float = 0.0) -> None:
    """Give every peer that has run its status: measured, or wrong.

    A wrong output gets no speed. Twice the error of plain PyTorch in the same dtype is allowed.
    own_error: that of the output which all are compared with; twice as much is allowed too.
    """
    stock = [r["difference"] for r in records if r["peer"] in STOCK and "difference" in r]
    errors = [own_error, *filter(math.isfinite, stock)]
    allowed = max(LEAST_ALLOWED[dtype], *(2 * error for error in errors))
    for record in records:
        if "difference" not in record:
            continue
        record["allowed_difference"] = allowed
        if record["difference"] <= allowed:
            record["status"] = "measured"
            record.pop("reason", None)
        else:
            text = f"relative difference {record['difference']:.2g} > {allowed:.2g} allowed"
            refuse(record, "wrong", text)
