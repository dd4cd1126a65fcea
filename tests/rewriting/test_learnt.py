"""Times of layers that `tune=True` keeps for later processes, and who may read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch import isa
from oxytorch.__main__ import main
from oxytorch.core import cache
from oxytorch.rewriting import learnt, measure

LEVELS = [each.name for each in isa.levels() if each.supported]
KEY = ("linear", (768, True), torch.bfloat16, None, nn.LayerNorm, 2)


@pytest.fixture(autouse=True)
def _fresh(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_known", {})
    learnt._read.cache_clear()


def test_times_are_known_to_a_later_process(own_cache: Path) -> None:
    assert learnt.recall(KEY) is None
    assert learnt.keep({KEY: (0.25, 1e-7)})
    assert learnt.keep({(*KEY, "other"): (3.0,)})
    assert learnt.recall(KEY) == (0.25, 1e-7) and learnt.recall((*KEY, "other")) == (3.0,)
    code = (
        "import torch; from torch import nn; from oxytorch.rewriting import learnt\n"
        "print(learnt.recall(('linear', (768, True), torch.bfloat16, None, nn.LayerNorm, 2)))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(own_cache), "OXYTORCH_ISA": isa.active()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "(0.25, 1e-07)"


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_its_own(level: str) -> None:
    for other in LEVELS:
        with isa.use(other):
            learnt.keep({KEY: (float(LEVELS.index(other)),)})
    with isa.use(level):
        assert learnt.recall(KEY) == (float(LEVELS.index(level)),)
        assert [each["serves"] for each in learnt.kept()].count(True) == 1


@pytest.mark.parametrize(
    "part", [object(), lambda: None, torch.ones(1), type("Own", (), {"__module__": "__main__"})]
)
def test_what_only_this_process_can_tell_is_not_kept(part: Any) -> None:
    learnt.keep({("a", part): (1.0,), ("a", "b"): (2.0,)})
    assert learnt.recall(("a", part)) is None and learnt.recall(("a", "b")) == (2.0,)
    assert [each["times"] for each in learnt.kept()] == [1]


def test_a_damaged_file_is_as_good_as_absent() -> None:
    learnt.keep({KEY: (1.0,)})
    (kept,) = learnt.kept()
    content = bytearray(kept["path"].read_bytes())
    content[-5] ^= 1
    kept["path"].write_bytes(content)
    learnt._read.cache_clear()
    assert learnt.recall(KEY) is None and learnt.kept() == []
    learnt.keep({KEY: (2.0,)})
    assert learnt.recall(KEY) == (2.0,)


def _layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), torch.ones(8, 512)


def test_tune_keeps_what_later_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _layers()
    with torch.no_grad():
        oxytorch.optimize(model.eval(), sample_input=x, tune=True)
        (kept,) = learnt.kept()
        assert kept["times"] > 0 and kept["serves"]
        monkeypatch.setattr(measure, "_known", {})

        def no_time(*_: Any) -> Any:
            raise AssertionError("timed again")

        monkeypatch.setattr(measure, "_ratio", no_time)
        monkeypatch.setattr(measure, "_quartiles", no_time)
        oxytorch.optimize(model, sample_input=x)
        with pytest.raises(AssertionError, match="timed again"):
            oxytorch.optimize(model, sample_input=x, tune=True)


def test_without_tune_nothing_is_written(own_cache: Path) -> None:
    model, x = _layers()
    with torch.no_grad():
        oxytorch.optimize(model.eval(), sample_input=x)
    assert learnt.kept() == [] and not (own_cache / "oxytorch").exists()


def test_a_cache_that_cannot_be_written_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.Path, "write_bytes", full)
    model, x = _layers()
    with torch.no_grad():
        tuned = oxytorch.optimize(model.eval(), sample_input=x, tune=True)
        torch.testing.assert_close(tuned(x), model(x))
    assert "No space left" in caplog.text and learnt.kept() == []


def test_the_command_tells_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 0
    assert "nothing is kept yet" in capsys.readouterr().out
    learnt.keep({KEY: (1.0,)})
    assert main(["tune"]) == 0
    shown = capsys.readouterr().out
    assert "1 time of a layer, used here" in shown and torch.__version__ in shown
    assert main(["tune", "--forget"]) == 0
    assert "removed 1 file of times" in capsys.readouterr().out
    assert learnt.recall(KEY) is None and learnt.kept() == []
