"""The programs whose traces were recorded run, at small sizes and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "memory"
SMALL = {
    "lora_finetuning": "--layers 2 --width 128 --inner 64 --vocabulary 50 --steps 2 --longest 300",
    "serving": "--layers 2 --width 256 --inner 64 --vocabulary 50 --batches 5 --prompt 40",
    "unet": "--channels 64 --steps 1 --batch 2 --largest 32",
    "mixture_of_experts": "--layers 2 --width 256 --inner 64 --vocabulary 50 --steps 2 "
    "--longest 200",
    "resnet": "--epochs 1 --steps 1 --batch 4 --last 2 --evaluation 4 --image 64 --blocks 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_program_runs_without_a_gpu(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--device", "cpu", *SMALL[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["seconds"] >= 0
