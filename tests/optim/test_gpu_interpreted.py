"""Runs a part of the tests of steps on GPUs in Triton's interpreter, in a process apart."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

QUICK = (
    "AdamW-plain-fp32 or AdamW-plain-split-int8 or replaced_memory or replaced_state or "
    "planned_once or loaded_checkpoint"
)
# The norm of gradients has a thousand programs, which the interpreter takes seconds for.
CLIPPING = "clipped or clipping"


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs on the GPU here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(f"not ({QUICK} or {CLIPPING})", id="rest", marks=pytest.mark.slow),
        pytest.param(CLIPPING, id="clipping", marks=pytest.mark.slow),
    ],
)
def test_steps_on_a_gpu_hold_in_the_interpreter(selection: str) -> None:
    folder = Path(__file__).parent
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"),
            *(str(folder / "test_gpu.py"), str(folder / "test_gpu_gradients.py"), "-k", selection),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-1000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None and int(passed[1]) >= 5
