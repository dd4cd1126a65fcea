"""Programs have a plan of their memory: places of results as formulas of the sizes of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch import testing
from oxytorch.graph import explain, free_memory
from oxytorch.program.check import check
from oxytorch.program.plan import ArenaPlan
from oxytorch.program.program import Program

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.10"), reason="torch 2.10 makes no tensors with a deleter"
)
STEPS = """inputs 1 0 0
%1 = oxytorch::rms_norm %0 none 1e-05
%2 = oxytorch::softmax %1 1.0 none
%3 = aten::transpose.int %1 0 1
%4 = oxytorch::rms_norm %2 none 1e-05
%5 = aten::transpose.int %3 0 1
%6 = oxytorch::softmax %4 2.0 none
%7 = add %6 %5 1.0
outputs %7
"""
ROW = 96 * 4
PLACES = "place %1 0 384*%0.0\nplace %2 1 384*%0.0\nplace %4 2 384*%0.0\nplace %6 1 384*%0.0"


@pytest.fixture(autouse=True, params=[False, True], ids=["", "poisoned"])
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    free_memory()
    with testing.arenas(poisoned=request.param):
        yield


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LayerNorm(96), nn.LayerNorm(96)
        self.layer = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = torch.softmax(self.layer(y), -1)
        return self.layer(self.second(z + y) + y)


def _exported() -> oxytorch.ProgramModel:
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        exported = torch.export.export(
            Layers().eval(), (torch.randn(4, 50, 96),), dynamic_shapes=(dynamic,)
        )
    found: oxytorch.ProgramModel = oxytorch.optimize(exported)
    return found


def test_the_arena_is_as_large_as_the_formula_says() -> None:
    model, wanted = _exported(), Layers().eval()
    plan = model.program.plan
    assert plan.places and "%0.0" in plan.formula and "%0.1" in plan.formula
    assert str(plan) in str(model)
    for shape in (
        (4, 50, 96),
        (40, 50, 96),
        (2, 700, 96),
        (3, 11, 96),
        (300, 600, 96),
        (4, 50, 96),
    ):
        x = torch.randn(*shape)
        with torch.no_grad():
            found, own = model(x), wanted(x)
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
        memory = model.program.memory()
        assert 0 < memory.arena <= plan.arena([shape]) <= plan.results([shape])
        assert memory.arena > 0.9 * plan.arena([shape])


def test_a_saved_program_has_its_plan(tmp_path: Path) -> None:
    model = _exported()
    oxytorch.save(model, tmp_path / "model.oxy")
    loaded = oxytorch.load(tmp_path / "model.oxy")
    assert loaded.program.plan.places and loaded.program.plan.formula == model.program.plan.formula


def test_explain_tells_the_arena() -> None:
    with torch.no_grad():
        text = str(explain(Layers().eval(), torch.randn(4, 50, 96)))
    assert "Arena" in text and "place %" in text


def test_values_are_those_without_a_plan() -> None:
    program, plain = Program(STEPS + PLACES, []), Program(STEPS.strip(), [])
    for rows in (1000, 1, 0, 40, 3000, 12):
        x = torch.randn(rows, 96)
        for is_unseen in (False, True):
            assert torch.equal(program([x], is_unseen=is_unseen)[0][0], plain([x])[0][0])
        if rows == 3000:
            assert program.memory().arena == 3 * (rows * ROW + 64)


@pytest.mark.parametrize(
    "formula",
    [
        "8",  # less than a result takes, as are the next two
        "384",
        "4096*%0.1",
        "1000000000*%0.0*%0.0*%0.0",  # more than any machine has
        "35184372088832*%0.0*%0.0*%0.0*%0.0*%0.0",  # which is no number of 64 bits
        "-384*%0.0",
        "384*%0.5",  # no such dimension
    ],
)
def test_a_formula_that_is_wrong_is_not_followed(formula: str) -> None:
    program = Program(STEPS + PLACES.replace("384*%0.0", formula), [])
    plain = Program(STEPS.strip(), [])
    for rows in (1000, 40):
        x = torch.randn(rows, 96)
        assert torch.equal(program([x])[0][0], plain([x])[0][0])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["%1 0 4*%0.0", "%2 0 4*%0.0"], "another value lies that is needed"),
        # %5 is a view of %1, which is needed to the end
        (["%1 0 4*%0.0", "%4 0 4*%0.0"], "another value lies that is needed"),
        (["%7 0 4*%0.0"], "no result of an operator of ours"),
        (["%3 0 4*%0.0"], "no result of an operator of ours"),
        (["%0 0 4*%0.0"], "no result of an operator of ours"),
        (["%9 0 4*%0.0"], "which nothing made"),
        (["%2 0 4*%0.0", "%1 1 4*%0.0"], "not in order"),
        (["%1 0 4*%0.0", "%1 1 4*%0.0"], "twice"),
        (["%1 1 4*%0.0"], "numbered in order"),
        (["%1 -1 4*%0.0"], "out of range"),
        (["%1 0 4*%1.0"], "names no input"),
        (["%1 0 4*$0"], "names no input"),
        (["%1 0 4*%0.-1"], "names no dimension"),
        (["%1 0 4*x"], "expected a number"),
        (["%1 0 4**2"], "expected a factor"),
        (["%1 0 99999999999999999999"], "expected a number"),
        (["%1 0"], "ends too early"),
        (["%1 0 4 4"], "more words"),
    ],
)
def test_plans_that_are_wrong_are_refused(places: list[str], message: str) -> None:
    lines = "\n".join(f"place {place}" for place in places)
    with pytest.raises(RuntimeError, match=message):
        Program(STEPS + lines, [])


def test_an_output_has_no_place() -> None:
    text = (
        "inputs 1 0 0\n%1 = oxytorch::softmax %0 1.0 none\n%2 = aten::view %1 [ -1 ]\noutputs %2\n"
    )
    with pytest.raises(RuntimeError, match="an output"):
        Program(text + "place %1 0 4*%0.0", [])


def test_files_are_checked_by_line() -> None:
    assert check(STEPS + PLACES).tensor_results == 1
    for line, message in (
        ("place %9 0 4", "tensor that exists"),
        ("place %1 x 4", "number of a buffer"),
        ("place %1 0", "expected place"),
        ("place %1 0 4 5", "expected place"),
    ):
        with pytest.raises(ValueError, match=f"line 14.*{message}"):
            check(f"{STEPS}{PLACES}\n{line}")


def test_who_holds_a_result_keeps_it() -> None:
    """torch's operator gives its argument itself, of which no plan knows."""
    text = """inputs 1 0 0
%1 = oxytorch::rms_norm %0 none 1e-05
%2 = aten::flip %1 [ ]
%3 = oxytorch::softmax %1 1.0 none
%4 = oxytorch::rms_norm %3 none 1e-05
%5 = oxytorch::softmax %4 1.0 none
%6 = add %5 %2 1.0
outputs %6"""
    places = "\nplace %1 0 384*%0.0\nplace %3 1 384*%0.0\nplace %4 0 384*%0.0"
    x = torch.randn(500, 96)
    for given in (text, text.replace("aten::flip %1 [ ]", "aten::positive %1")):
        for _ in range(2):
            assert torch.equal(
                Program(given + places, [])([x])[0][0], Program(given, [])([x])[0][0]
            )


def test_a_plan_is_read_from_text() -> None:
    plan = ArenaPlan.of_text(STEPS + PLACES)
    assert str(plan) == PLACES and len(plan.places) == 4
    assert plan.arena([(1000, 96)]) == 3 * (1000 * ROW + 64)
    assert plan.results([(1000, 96)]) == 4 * (1000 * ROW + 64)
    assert ArenaPlan.of_text(STEPS).places == () and ArenaPlan().formula == ""
