"""`oxytorch run --optimize`: models in evaluation mode are optimized, and nothing else changes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch import info
from oxytorch.launch import codeless
from oxytorch.rewriting.changes import log_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.first(x)) * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.fixture(autouse=True)
def hook(monkeypatch, pack_small_layers):
    """The hook, in this process for the time of a test."""
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    monkeypatch.setattr(codeless, "installed", None)
    codeless.install(codeless.Settings())


def is_optimized(model: nn.Module) -> bool:
    return log_of(model) is not None


X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)


@torch.no_grad()
def test_model_is_optimized_at_its_first_call_in_evaluation_mode(capsys):
    model = Net()
    expected = model(X, scale=2.0)
    assert not is_optimized(model)
    model.eval()
    torch.testing.assert_close(model(X, scale=2.0), expected)
    assert is_optimized(model)
    assert not model._forward_pre_hooks
    assert "oxytorch run --optimize: Net: " in capsys.readouterr().err
    torch.testing.assert_close(model(X, scale=2.0), expected)


@torch.no_grad()
def test_sample_of_the_first_call_is_used_where_asked():
    codeless.install(codeless.Settings(torch.bfloat16, sample=True))
    model = Net().eval()
    model(X, scale=2.0)
    assert is_optimized(model)
    assert model.first.weight.dtype == torch.bfloat16


def test_calls_with_gradients_in_training_mode_or_autocast_leave_it_alone():
    model = Net().eval()
    model(X).sum().backward()
    model.zero_grad()
    with torch.no_grad(), torch.autocast("cpu"):
        model(X)
    model.train()
    with torch.no_grad():
        model(X)
    assert not is_optimized(model)
    model.eval()
    with torch.inference_mode():
        model(X)
    assert is_optimized(model)


@torch.no_grad()
def test_outermost_module_is_the_one_that_is_optimized():
    model = Outer()
    model.inner.eval()
    model.eval()
    model(X)
    assert is_optimized(model) and not is_optimized(model.inner)
    assert not model.inner._forward_pre_hooks


@torch.no_grad()
def test_model_around_an_optimized_one_is_left_alone(capsys):
    model = Outer()
    model.inner.eval()(X)
    model.eval()(X)
    assert is_optimized(model.inner) and not is_optimized(model)
    assert "Outer runs as it is: oxytorch has changed it already" in capsys.readouterr().err


@torch.no_grad()
def test_model_that_is_trained_is_left_alone(capsys):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()(X)
    assert not is_optimized(model)
    assert "Net runs as it is: SGD trains it" in capsys.readouterr().err
    del optimizer


@torch.no_grad()
def test_error_of_ours_is_told_and_not_raised(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("a reason")

    monkeypatch.setattr(codeless, "optimize", fail)
    model = Net().eval()
    assert model(X).shape == X.shape
    assert "Net runs as it is: RuntimeError: a reason" in capsys.readouterr().err


@torch.no_grad()
def test_copies_are_optimized_too_and_files_need_no_oxytorch():
    model = Net().eval()
    other = copy.deepcopy(model)
    data = pickle.dumps(model)
    assert b"oxytorch.launch" not in data
    loaded = pickle.loads(data)
    for one in (other, model):
        one(X)
        assert is_optimized(one)
    torch.testing.assert_close(loaded(X), model(X))
    assert not is_optimized(loaded)


def test_modules_without_parameters_and_scripted_ones_are_left_alone(capsys):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    with torch.no_grad():
        nn.ReLU().eval()(X)
        scripted.eval()(X[:, :4])
    assert capsys.readouterr().err == ""


def test_info_shows_the_hook():
    facts = {"models": info.models()}
    assert facts["models"].startswith("models are optimized at their first call")


SCRIPT = """
from __future__ import annotations
import json, sys
from dataclasses import dataclass
import torch
import beside

@dataclass
class Kept:
    x: Later

class Later: ...

model = torch.nn.Linear(256, 256).eval()
with torch.no_grad():
    model(torch.ones(1, 256))
main = sys.modules["__main__"]
print(json.dumps([__name__, __file__, sys.argv, main.Kept is Kept, "_oxytorch" in vars(model)]))
sys.exit(4)
"""


def test_script_runs_as_python_runs_it(tmp_path):
    (tmp_path / "beside.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = str(Path(oxytorch.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "oxytorch", "run", "--optimize", "script.py", "--dtype", "a"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    words = ["script.py", "--dtype", "a"]
    assert json.loads(done.stdout) == ["__main__", str(script), words, True, True]
