"""The migration example: the program before and after gives the same."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oxytorch import compat
from scripts import module_of

FOLDER = Path(__file__).parents[2] / "examples" / "migration"


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def test_outputs_are_the_same_before_and_after(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("before.py", "after.py"):
        file = tmp_path / f"{name}.pt"
        monkeypatch.setattr(sys, "argv", [name, "--save", str(file)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        found.append(torch.load(file))
    before, after = found
    limits = module_of(FOLDER / "compare.py").LIMITS
    assert {*before} == {*after} == {*limits}
    for name, limit in limits.items():
        assert (before[name] - after[name]).norm() <= limit * after[name].norm()


@pytest.mark.slow
def test_comparison_runs_both_programs_and_shows_what_changed() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compare.py"), "--diff"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == 2
    assert "-import intel_extension_for_pytorch as ipex" in done.stdout
    assert "+quantized = oxytorch.quantize(model, calibration_data)" in done.stdout
