"""The training example in its short form: what it learns, prints and writes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from oxytorch.benchmark.core.results import read_run
from scripts import module_of

SCRIPT = Path(__file__).parents[2] / "examples" / "train_character_model.py"
EIGHT_BIT = "bfloat16, split weights, 8-bit states"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module."""
    return module_of(SCRIPT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command prints, as a user runs it, and the path of its files without a suffix."""
    base = tmp_path_factory.mktemp("example") / "result.of.short"
    words = [sys.executable, str(SCRIPT), "--short", "--steps", "20", "--output", str(base)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "step 20 of 20, 0 s left" in ended.stderr
    return ended.stdout, base


@pytest.fixture(scope="module")
def losses(finished: tuple[str, Path]) -> dict[str, dict[str, Any]]:
    """Way -> what became of its losses."""
    results = read_run(Path(f"{finished[1]}.json"))["results"]
    return {result["way"]: result for result in results if result["measure"] == "loss"}


def test_every_way_learns(losses: dict[str, dict[str, Any]], example: ModuleType) -> None:
    assert [*losses] == [way.name for way in example.WAYS]
    for result in losses.values():
        for curve in result["curves"]:
            assert [step for step, _ in curve] == [0, 10, 20]
            assert 4 < curve[0][1] < 5, "an untrained model guesses among about 100 characters"
            assert curve[-1][1] < curve[0][1] - 1


def test_bfloat16_ends_where_float32_does(losses: dict[str, dict[str, Any]]) -> None:
    first, second = losses["float32"]["losses"]
    chance = abs(first - second)
    for way, result in losses.items():
        for loss, expected in zip(result["losses"], (first, second), strict=True):
            assert abs(loss - expected) < 0.25 * chance, way


def test_a_checkpoint_serves_the_stock_model(losses: dict[str, dict[str, Any]]) -> None:
    for way, result in losses.items():
        for plain, loss in zip(result["plain_losses"], result["losses"], strict=True):
            assert plain == pytest.approx(loss, abs=0.01), way
    assert losses["float32"]["plain_losses"] == losses["float32"]["losses"]


def test_memory_is_what_the_formats_take(finished: tuple[str, Path]) -> None:
    results = read_run(Path(f"{finished[1]}.json"))["results"]
    kinds = {r["way"]: r["bytes_per_parameter"] for r in results if r["measure"] == "step"}
    assert kinds["float32"] == {"weights": 4, "gradients": 4, "exp_avg": 4, "exp_avg_sq": 4}
    split = kinds["bfloat16, split weights"]
    # The normalizations keep float32 weights and have no lower halves.
    assert split["weights"] + split["low_half"] == pytest.approx(4, abs=0.01)
    assert sum(kinds[EIGHT_BIT].values()) - kinds[EIGHT_BIT]["gradients"] < 6.2


def test_tables_and_files_are_written(finished: tuple[str, Path]) -> None:
    printed, base = finished
    for part in ("text: the help topics of Python", f"| {EIGHT_BIT} |", f"wrote {base}.json"):
        assert part in printed
    if importlib.util.find_spec("matplotlib") is not None:
        assert Path(f"{base}.svg").read_bytes().startswith(b"<?xml")


def test_times_alone_have_no_losses_and_no_plot(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--short", "--only", "times", "--steps", "2", "--output", str(tmp_path / "times")]
    assert example.main(words) == 0
    assert "Final held-out loss" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]
    results = read_run(tmp_path / "times.json")["results"]
    assert {result["measure"] for result in results} == {"step"}
    assert len(results) == len(example.WAYS) + 1


def test_what_is_held_out_is_not_trained_on(example: ModuleType) -> None:
    text = example.read_text(None)
    assert len(text.held_out) == pytest.approx(0.1 * len(text.training), rel=0.2)
    as_text = "".join(text.characters[number] for number in text.training)
    held_out = "".join(text.characters[number] for number in text.held_out)
    lines = [line for line in held_out.split("\n") if len(line) > 60]
    assert len(lines) > 100
    # Paragraphs are told apart as a whole; a few of their lines still stand in others.
    assert sum(line in as_text for line in lines) < 0.05 * len(lines)


def test_a_checkpoint_is_exact(example: ModuleType) -> None:
    run = example.Run(example.WAYS[2], 0, example.SHORT, example.read_text(None))
    for _ in range(3):
        run.step()
    plain = run.plain()
    assert any(p.dtype == torch.bfloat16 for p in run.model.parameters())
    for name, weight in plain.model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, run.model.state_dict()[name]), name
    states = plain.optimizer.state_dict()["state"]
    for number, expected in run.optimizer.state_dict()["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(states[number][name], expected[name]), (number, name)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"short", "expected a text of at least 81920 characters, got 5"), (b"\xff", "not UTF-8")],
)
def test_a_text_that_cannot_be_learned_is_refused(
    content: bytes,
    complaint: str,
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert example.main(["--text", str(path)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--steps", "0"], ["--seeds", "-1"], ["--only", "speed"]])
def test_nonsense_is_refused(
    words: list[str], example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
