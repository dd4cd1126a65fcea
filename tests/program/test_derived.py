"""What is made of lasting inputs, large ones piece by piece."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from marks import NEEDS_LIBRARY
from oxytorch.program import derived
from oxytorch.program.derived import Derived
from oxytorch.program.program import Step, Steps, Value

pytestmark = NEEDS_LIBRARY


def _steps() -> Steps:
    """Two inputs and a constant of both; results in another order than their steps."""
    a, b, factor = Value(), Value(), Value()
    twice, less, ratio = Value(), Value(), Value()
    made = [
        Step("aten::abs", [a], [twice]),
        Step("aten::div.Tensor", [b, factor], [ratio]),
        Step("aten::div.Tensor", [twice, factor], [less]),
    ]
    return Steps([a, b], {factor: torch.tensor(2.0)}, made, [ratio, less, twice])


@pytest.mark.parametrize("large", [1 << 30, 0], ids=["whole", "pieces"])
def test_the_values_are_the_same_in_pieces(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "LARGE", large)
    made = Derived(_steps(), [1, 0])
    a, b = torch.randn(3, 4), torch.randn(5)
    found = made([b, a])
    assert found is not None
    for got, wanted in zip(found, (b / 2, a.abs() / 2, a.abs()), strict=True):
        assert torch.equal(got, wanted)
    assert made([b, a])[0] is found[0]  # type: ignore[index]
    a.neg_().add_(1)
    assert torch.equal(made([b, a])[2], a.abs())  # type: ignore[index]


def test_pieces_share_no_value() -> None:
    pieces = derived._pieces(_steps())
    assert [(each.inputs, each.outputs) for each in pieces] == [([0], [1, 2]), ([1], [0])]


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_meet_late_are_one_piece(seed: int) -> None:
    """Steps of many values, which are joined through long chains of others."""
    chance = random.Random(seed)
    inputs = [Value() for _ in range(chance.randint(1, 6))]
    made, values = [], [*inputs]
    for _ in range(24):
        step = Step("aten::mul.Tensor", chance.choices(values, k=2), [Value()])
        made.append(step)
        values += [value for value in step.results if value is not None]
    steps = Steps(inputs, {}, made, chance.sample(values[len(inputs) :], 24))
    given = [torch.randn(3) for _ in inputs]
    pieces, found = derived._pieces(steps), {}
    for piece in pieces:
        results = piece.program([given[place] for place in piece.inputs])[0]
        found.update(zip(piece.outputs, results, strict=True))
    for place, wanted in enumerate(steps.program()(given)[0]):
        assert torch.equal(found[place], wanted)


MEMORY = """
import torch, oxytorch
from pathlib import Path

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

layers = [m for _ in range(24) for m in (torch.nn.Linear(1024, 2048), torch.nn.ReLU(),
                                         torch.nn.Linear(2048, 1024))]
model = torch.nn.Sequential(*layers).eval()
size = sum(p.nbytes for p in model.parameters())
x = torch.randn(4, 1024)
with torch.inference_mode():
    model(x)
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
oxytorch.quantize(model, [x], dtype=torch.bfloat16)
print((kilobytes("VmHWM") - before) * 1024 / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_temporary_values_of_large_weights_do_not_add_up() -> None:
    """A bfloat16 copy is half of the model, integers are a quarter. With all weights in one
    program, temporary values between what is kept took as much as the model again."""
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 1.4
