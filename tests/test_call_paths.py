"""How many steps lie between a call and its arithmetic, as ARCHITECTURE.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import oxytorch
from oxytorch.quantization import Int4Weight

PACKAGE = Path(oxytorch.__file__).parent
BINDING = "ops/_binding.py"
"""Where Python calls the compiled function of an op."""


def _path(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The files and functions of this package that are on the stack when an op is first called."""
    found: list[list[tuple[str, str]]] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _is(frame, BINDING):
            return
        stack: list[tuple[str, str]] = []
        each: FrameType | None = frame
        while each is not None:
            file = Path(each.f_code.co_filename)
            if PACKAGE in file.parents:
                stack.append((file.relative_to(PACKAGE).as_posix(), each.f_code.co_name))
            each = each.f_back
        found.append(stack[::-1])

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0]


def _is(frame: FrameType, name: str) -> bool:
    return Path(frame.f_code.co_filename) == PACKAGE / name


def test_an_optimizer_step_takes_four_functions_to_its_op() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = oxytorch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        path = _path(optimizer.step)
    named = [(file, name) for file, name in path if name != "call"]  # but for decorators
    assert named == [
        ("optim/optimizer.py", "step"),
        ("optim/optimizer.py", "_step_group"),
        ("optim/executor.py", "run"),
        ("optim/executor.py", "run_step"),
    ]


def test_a_layer_of_int4_calls_its_op_from_one_file() -> None:
    layer = nn.Sequential(nn.Linear(64, 64)).eval()
    oxytorch.quantize_(layer, Int4Weight(group_size=32))
    x = torch.randn(1, 64)
    with torch.inference_mode():
        layer(x)
        path = _path(lambda: layer(x))
    assert [*dict.fromkeys(file for file, _ in path)] == ["quantization/layers.py", BINDING]
