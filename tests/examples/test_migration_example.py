"""The migration example: the program before and after gives the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "migration" / "compare.py"


def test_outputs_are_the_same_before_and_after() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--diff"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == 2
    assert "-import intel_extension_for_pytorch as ipex" in done.stdout
    assert "+quantized = oxytorch.quantize(model, calibration_data)" in done.stdout
