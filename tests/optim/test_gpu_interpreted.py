"""Runs a part of test_gpu.py in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The norm of gradients has a thousand programs, which the interpreter takes seconds for.
SLOW = "clipped or (clipping_in_the_step and not dtype0) or clipping_at_once"


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs on the GPU here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "selection", [f"not ({SLOW})", pytest.param(SLOW, marks=pytest.mark.slow)], ids=["most", "slow"]
)
def test_steps_on_a_gpu_hold_in_the_interpreter(selection: str) -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(str(Path(__file__).parent / "test_gpu.py"), "-k", selection),
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
