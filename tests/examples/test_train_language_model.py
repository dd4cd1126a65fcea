"""The model that the language model example trains: what it learns, and what formats cost it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from oxytorch.__main__ import main
from oxytorch.benchmark.core.results import read_run
from scripts import module_of

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_language_model.py"

LIMITS = {
    "bf16": 0.001,
    "bf16, int8 cache": 0.001,
    "int8": 0.001,
    "int8-int8": 0.005,
    "fp8": 0.005,
    "int4": 0.02,
    "int4, calibrated": 0.02,
    "nf4": 0.02,
}
"""The most by which perplexity may grow, as a fraction of that in float32."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module."""
    return module_of(SCRIPT)


def _trained(out: Path, *words: str) -> Path:
    """A model's folder, made by the command as a user runs it."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), *words],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert ended.returncode == 0, ended.stderr
    assert "held-out loss" in ended.stdout and f"wrote {out}" in ended.stdout
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("trained") / "tiny", "--short")


def _costs(folder: Path, result: Path, tokens: int) -> dict[str, dict[str, Any]]:
    """Row -> its figures, as `oxytorch llm perplexity` writes them."""
    words = ["--text", str(folder / "held_out.txt"), "--tokens", str(tokens)]
    words += ["--weights", "float32,bf16,int8,int8-int8,fp8,int4,nf4", "--kv-cache", "bf16,int8"]
    words += ["--calibration", str(folder / "calibration.txt"), "--json", str(result)]
    assert main(["llm", "perplexity", str(folder), *words]) == 0
    return {row["label"]: row for row in read_run(result)["results"]}


def test_the_model_learns_and_is_one_of_transformers(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = json.loads((tiny / "training.json").read_text())
    assert record["losses"][0] == pytest.approx(math.log(512), abs=0.3)
    # Knowing how often each token occurs gives about 5.5.
    assert record["held_out_loss"] < 5.25
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == record["settings"]["parameters"]
    text = "def f(self):\n    return 1  # é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_what_is_held_out_is_not_trained_on(example: ModuleType, tiny: Path) -> None:
    text = example.read_text(None, files=6)
    held_out = (tiny / "held_out.txt").read_text(encoding="utf-8")
    assert held_out == "\n".join(text.held_out)
    everything = "\n".join(text.training)
    lines = [line for line in held_out.split("\n") if len(line) > 60]
    assert len(lines) > 1000
    assert sum(line in everything for line in lines[::10]) < 0.05 * len(lines[::10])


@pytest.mark.slow
def test_formats_cost_the_tiny_model_little(tiny: Path, tmp_path: Path) -> None:
    rows = _costs(tiny, tmp_path / "costs.json", 8192)
    trained = json.loads((tiny / "training.json").read_text())["held_out_loss"]
    assert rows["float32"]["perplexity"] == pytest.approx(math.exp(trained), rel=0.2)
    assert len({row["perplexity"] for row in rows.values()}) == len(rows)
    for label, most in LIMITS.items():
        assert abs(rows[label]["change"]) <= most, (label, rows[label])


@pytest.mark.slow
def test_formats_cost_the_model_little_and_calibration_helps(tmp_path: Path) -> None:
    rows = _costs(_trained(tmp_path / "small"), tmp_path / "costs.json", 32_768)
    for label, most in LIMITS.items():
        assert rows[label]["change"] <= most, (label, rows[label])
    assert rows["int4, calibrated"]["change"] < rows["int4"]["change"]
    assert rows["nf4, calibrated"]["change"] < rows["nf4"]["change"]


def test_too_little_text_is_refused(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("short")
    assert example.main([str(tmp_path / "out"), "--text", str(tmp_path)]) == 2
    assert "at least 20 text files of 200,000 characters" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        example.main([str(tmp_path / "out"), "--steps", "0"])
    assert ended.value.code == 2
    assert "--steps" in capsys.readouterr().err
