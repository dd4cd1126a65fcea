"""autotune: which layers stay in floating point so that a score is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import PreNorm, error, with_outliers
from torch import Tensor, nn

from oxytorch.quantization import (
    Autotuned,
    Int8StaticActivationInt8Weight,
    autotune,
    load_recipe,
    recipe_of,
    save_recipe,
)
from oxytorch.quantization.static.tuning import fewest

TOKENS = [torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(n)) for n in range(4)]


class Parts(nn.Module):
    """Layers beside each other, some of which are given a huge channel that they weigh little."""

    def __init__(self, hard: Sequence[int], count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hard = {*hard}
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(count))
        with torch.no_grad():
            for place in hard:
                self.layers[place].weight[:, 0] /= 3000  # type: ignore[operator, index]

    def forward(self, x: Tensor) -> Tensor:
        huge = torch.cat([1000 * x[..., :1], x[..., 1:]], -1)
        given = (layer(huge if n in self.hard else x) for n, layer in enumerate(self.layers))
        return torch.cat([*given], -1)


ROWS = [torch.randn(40, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Score:
    """1 - the error of what a model gives; counts its calls, and may end one of them."""

    def __init__(self, model: nn.Module, data: Sequence[Tensor], ends_at: int | None = None):
        with torch.no_grad():
            self.wanted = [model(x) for x in data]
        self.data, self.calls, self.ends_at = data, 0, ends_at

    def __call__(self, model: nn.Module) -> float:
        if self.calls == self.ends_at:
            raise KeyboardInterrupt
        self.calls += 1
        with torch.no_grad():
            found = [model(x) for x in self.data]
        return 1 - max(map(error, found, self.wanted))


def computed(result: Autotuned[Any], compute: str) -> set[str]:
    return {name for name, own in result.recipe.layers.items() if own.compute == compute}


def test_a_model_that_loses_little_has_all_layers_in_integers_after_one_trial() -> None:
    model = Parts([]).eval()
    score = Score(model, ROWS)
    result = autotune(model, ROWS, score, max_loss=0.02)
    assert score.calls == 2 and len(result.trials) == 1 and result.trials[0].passed
    assert computed(result, "static") == {f"layers.{n}" for n in range(8)}
    assert result.trials[0].int8_share == 1 and result.chosen is result.trials[0]
    assert recipe_of(result.model) == result.recipe
    assert len(result.order) == 8


def test_smoothing_and_other_ranges_are_tried_before_any_layer_is_left_out() -> None:
    torch.manual_seed(0)
    model = with_outliers(PreNorm()).eval()
    result = autotune(model, TOKENS, Score(model, TOKENS), max_loss=0.02)
    assert [trial.passed for trial in result.trials] == [False, True]
    assert "smoothed" in result.trials[1].ranges
    assert not computed(result, "float") and any(each.factors for each in result.recipe.smoothing)


@pytest.mark.parametrize("hard", [(5,), (1, 4, 6), (0, 1, 2, 3, 5, 6, 7)])
def test_the_most_sensitive_layers_stay_in_floating_numbers(hard: tuple[int, ...]) -> None:
    model = Parts(hard).eval()
    result = autotune(model, ROWS, Score(model, ROWS), max_loss=0.02)
    wanted = {f"layers.{n}" for n in hard}
    assert computed(result, "float") == wanted
    assert {each.module for each in result.order[: len(hard)]} == wanted
    assert len(result.trials) <= 12 and result.is_complete
    text = str(result)
    assert f"layers.{hard[0]}" in text and "* " in text
    with torch.no_grad():
        assert error(result.model(ROWS[0]), model(ROWS[0])) < 0.02


def test_layers_that_ranges_of_rows_repair_are_rounded_row_by_row() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    rows = [torch.randn(40, 32) * torch.logspace(-3, 2, 40)[:, None] for _ in range(3)]

    def score(other: nn.Module) -> float:
        with torch.no_grad():
            errors = [error(other(x[None]), model(x[None])) for x in rows[0]]
        return 1 - max(errors)

    result = autotune(model, rows, score, max_loss=0.05)
    assert computed(result, "dynamic") == {"0", "2"}
    assert result.chosen is result.trials[-1] and result.trials[-1].int8_share == 1


def test_where_nothing_is_good_enough_all_layers_stay_in_floating_numbers() -> None:
    model = Parts([2]).eval()

    def score(other: nn.Module) -> float:
        with torch.no_grad():
            return float(torch.equal(other(ROWS[0]), model(ROWS[0])))

    result = autotune(model, ROWS, score, max_loss=0)
    assert computed(result, "float") == {f"layers.{n}" for n in range(8)}
    assert result.chosen is None and "every layer stays in floating point" in str(result)
    with torch.no_grad():
        assert error(result.model(ROWS[0]), model(ROWS[0])) < 1e-5


def test_trials_are_bounded() -> None:
    model = Parts([1, 4, 6]).eval()
    score = Score(model, ROWS)
    result = autotune(model, ROWS, score, max_loss=0.02, most_trials=3)
    assert len(result.trials) == 3 and score.calls == 4 and not result.is_complete
    assert "the trials were used up" in str(result)
    with torch.no_grad():
        assert error(result.model(ROWS[0]), model(ROWS[0])) < 0.02


def test_losses_may_be_differences_and_scores_negative() -> None:
    model = Parts([3]).eval()
    score = Score(model, ROWS)
    result = autotune(model, ROWS, lambda m: 100 * score(m) - 100, max_loss=2.0, absolute=True)
    assert computed(result, "float") == {"layers.3"} and result.baseline == pytest.approx(0, abs=1)
    result = autotune(model, ROWS, lambda m: 100 * score(m) - 200, max_loss=0.02)
    assert computed(result, "float") == {"layers.3"} and result.baseline < 0


def test_progress_tells_what_is_tried() -> None:
    model, seen = Parts([3]).eval(), list[tuple[int, int, str]]()
    result = autotune(
        model, ROWS, Score(model, ROWS), 0.02, progress=lambda *each: seen.append(each)
    )
    assert seen[0] == (0, 24, "the original") and seen[-1][:2] == (len(result.trials),) * 2
    assert any("1 layers floating" in text for _, _, text in seen)


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    model = Parts([1, 4, 6]).eval()
    whole = autotune(model, ROWS, Score(model, ROWS), max_loss=0.02)
    path = tmp_path / "tuning.json"
    calls = 0
    for ends_at in (0, 1, 2, 3):
        score = Score(model, ROWS, ends_at)
        with pytest.raises(KeyboardInterrupt):
            autotune(model, ROWS, score, max_loss=0.02, path=path)
        calls += score.calls
    score = Score(model, ROWS)
    result = autotune(model, ROWS, score, max_loss=0.02, path=path)
    assert calls + score.calls == 1 + len(whole.trials)
    assert result.recipe == whole.recipe
    assert [t.floating for t in result.trials] == [t.floating for t in whole.trials]
    nothing = Score(model, ROWS, 0)  # which would end at its first call
    again = autotune(model, ROWS, nothing, max_loss=0.02, path=path)
    assert again.recipe == result.recipe and again.order == result.order
    with torch.no_grad():
        assert torch.equal(again.model(ROWS[0]), result.model(ROWS[0]))
    save_recipe(again.recipe, tmp_path / "recipe.json")
    assert load_recipe(tmp_path / "recipe.json") == again.recipe


def test_a_file_serves_other_limits(tmp_path: Path) -> None:
    model, path = Parts([1, 4]).eval(), tmp_path / "tuning.json"
    autotune(model, ROWS, Score(model, ROWS), max_loss=0.02, path=path)
    score = Score(model, ROWS)
    result = autotune(model, ROWS, score, max_loss=0.9, path=path)
    assert score.calls == 0 and len(result.trials) == 1 and not computed(result, "float")


def test_files_of_other_searches_are_refused(tmp_path: Path) -> None:
    model, path = Parts([]).eval(), tmp_path / "tuning.json"
    autotune(model, ROWS, Score(model, ROWS), path=path, max_loss=0.5)
    other = Parts([1]).eval()
    with pytest.raises(ValueError, match=r"expected a file of this model, got .*tuning\.json"):
        autotune(other, ROWS, Score(other, ROWS), path=path)
    with pytest.raises(ValueError, match="expected a file of this calibration_data"):
        autotune(model, ROWS[1:], Score(model, ROWS), path=path)
    config = Int8StaticActivationInt8Weight(symmetric=True)
    with pytest.raises(ValueError, match="expected a file of this settings"):
        autotune(model, ROWS, Score(model, ROWS), path=path, config=config)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="x"),
        lambda d: d.update(version=9),
        lambda d: d.pop("scores"),
        lambda d: d.update(baseline="much"),
        lambda d: d.update(scores={"a": [True, 1.0]}),
        lambda d: d.update(scores=[1]),
        lambda d: d.update(recipes={"a": {}}),
        lambda d: d.update(errors={"a": [{"module": 1}]}),
        lambda d: d.update(errors={"a": [{**_ERROR, "sqnr": "good"}]}),
    ],
)
def test_damaged_files_are_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    model, path = Parts([], 2).eval(), tmp_path / "tuning.json"
    autotune(model, ROWS, Score(model, ROWS), path=path, max_loss=0.5)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=r"expected a file that autotune wrote, got .*tuning\.json"
    ):
        autotune(model, ROWS, Score(model, ROWS), path=path)
    path.write_text("{")
    with pytest.raises(ValueError, match="expected a file that autotune wrote"):
        autotune(model, ROWS, Score(model, ROWS), path=path)


_ERROR = {"module": "a", "compute": "static", "sqnr": 1.0, "input_sqnr": 1.0, "products": 1}


def test_bad_input_is_refused() -> None:
    model = Parts([], 2).eval()
    score = Score(model, ROWS)
    bad: Any
    for bad, message in (
        ({"max_loss": -1}, "expected max_loss of 0 or more, got -1"),
        ({"max_loss": float("nan")}, "expected max_loss of 0 or more"),
        ({"most_trials": 0}, "expected most_trials of 1 or more, got 0"),
        ({"absolute": 1}, "expected absolute True or False, got 1"),
        ({"config": Int8StaticActivationInt8Weight}, "expected config to be Int8Static"),
        ({"evaluate": 1}, "expected evaluate to be a function"),
        ({"evaluate": lambda m: "good"}, "expected evaluate to return a number, got str"),
        ({"evaluate": lambda m: float("nan")}, "a finite number for the original"),
        ({"evaluate": lambda m: 0.0}, "pass absolute=True"),
        ({"calibration_data": []}, "expected calibration_data with at least one input"),
        ({"calibration_data": ROWS[0]}, "expected calibration_data to be a list"),
    ):
        arguments = {"calibration_data": ROWS, "evaluate": score, **bad}
        with pytest.raises((TypeError, ValueError), match=message):
            autotune(model, **arguments)
    with pytest.raises(ValueError, match="in evaluation mode"):
        autotune(Parts([], 2), ROWS, score)


def test_a_score_that_is_no_number_is_one_that_failed() -> None:
    model = Parts([], 2).eval()
    score = Score(model, ROWS)

    def first_only(other: nn.Module) -> float:
        return 1.0 if other is model else float("nan")

    result = autotune(model, ROWS, first_only)
    assert all(not t.passed and t.score is None for t in result.trials) and result.chosen is None
    assert score.calls == 0


@pytest.mark.parametrize("most", [1, 2, 7, 73])
def test_the_fewest_are_found_in_few_questions(most: int) -> None:
    for wanted in range(1, most + 1):
        asked: list[int] = []

        def is_enough(number: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number >= wanted

        assert fewest(most, is_enough) == wanted
        assert len(asked) == len({*asked}) <= 2 * wanted.bit_length() and most not in asked
