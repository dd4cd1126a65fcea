"""Smoothing: channels of what layers take are divided, and their weights multiplied."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import (
    Block,
    Chain,
    Gated,
    PreNorm,
    Residual,
    calibrated,
    error,
    run,
    with_outliers,
)
from torch import Tensor, nn

import oxytorch
from oxytorch.graph.errors import CaptureError
from oxytorch.program import passes
from oxytorch.program.outputs import output_tensors
from oxytorch.program.passes import smoothing
from oxytorch.program.passes.quantized_layers import (
    Layer,
    Layers,
    Numbers,
    Quantization,
    Smoothing,
    named,
)
from oxytorch.program.recorded import Run
from oxytorch.program.tape import recorded_once
from oxytorch.quantization import (
    Int8StaticActivationInt8Weight,
    Recipe,
    convert,
    load_recipe,
    prepare,
    quantize,
    recipe_of,
    save_recipe,
)
from oxytorch.quantization.static.runs import names_of

SMOOTH = Int8StaticActivationInt8Weight(smooth=True)
_SEEDS = [torch.Generator().manual_seed(number) for number in range(6)]
TOKENS = [torch.randn(2, 9, 64, generator=each) for each in _SEEDS]
ROWS = [torch.randn(4, 7, 32, generator=each) for each in _SEEDS]
IMAGES = [torch.randn(2, 3, 16, 16, generator=each) for each in _SEEDS]


def outliers() -> PreNorm:
    torch.manual_seed(0)
    model = PreNorm().eval()
    with_outliers(model)
    return model


def test_smoothing_repairs_a_model_with_outliers_that_plain_integers_break() -> None:
    model = outliers()
    wanted = [run(model, each) for each in TOKENS]

    def worst(config: Int8StaticActivationInt8Weight) -> float:
        quantized = quantize(model, TOKENS, config)
        return max(error(run(quantized, x), y) for x, y in zip(TOKENS, wanted, strict=True))

    for symmetric in (False, True):
        plain = worst(Int8StaticActivationInt8Weight(symmetric=symmetric))
        smooth = worst(Int8StaticActivationInt8Weight(symmetric=symmetric, smooth=True))
        assert plain > 0.05 and smooth < 0.01, (plain, smooth)


def smoothed(model: nn.Module) -> dict[tuple[str, ...], Smoothing]:
    return {each.layers: each for each in recipe_of(model).smoothing}


def test_the_recipe_and_the_report_say_what_is_smoothed_and_why_other_layers_are_not() -> None:
    quantized = quantize(outliers(), TOKENS, SMOOTH)
    found = smoothed(quantized)
    assert found[("query", "key", "value")].factors and found[("up",)].factors
    assert found[("down",)].why == "aten::gelu before it lets no factors through"
    text = str(recipe_of(quantized))
    assert "input of query, key, value: alpha 0." in text and "64 factors" in text
    entries = {e.module: e for e in oxytorch.explain(quantized).entries if e.pass_name == "smooth"}
    assert entries["query, key, value"].applied and not entries["down"].applied


FORCED: list[tuple[Callable[[], nn.Module], list[Tensor], tuple[str, ...], int]] = [
    (PreNorm, TOKENS, ("query", "key", "value"), 64),
    (PreNorm, TOKENS, ("up",), 64),
    (PreNorm, TOKENS, ("out",), 64),  # through attention, by its values
    (Block, TOKENS, ("up",), 64),  # whose normalization others take too
    (Gated, ROWS, ("gate", "up"), 32),
    (Gated, ROWS, ("down",), 48),
    (Chain, IMAGES, ("groups",), 12),
    (Chain, IMAGES, ("last",), 48),
    (Chain, IMAGES, ("head",), 8),
    (Residual, [torch.randn(2, 3, 32, 32)], ("inner", "shortcut"), 16),
]


def factors_of(count: int) -> tuple[float, ...]:
    found: list[float] = torch.logspace(-2, 2, count)[torch.randperm(count)].tolist()
    return tuple(found)


@pytest.mark.parametrize(("make", "data", "layers", "count"), FORCED)
def test_factors_change_no_result_of_floating_numbers(
    make: Callable[[], nn.Module], data: list[Tensor], layers: tuple[str, ...], count: int
) -> None:
    torch.manual_seed(1)
    model = make().eval()
    recorded = recorded_once(lambda: model(data[0]), output_tensors, data[:1])[1]
    assert not isinstance(recorded, CaptureError)
    recording = Run(recorded, data[:1])
    steps, _ = recording.written()
    lasting = steps.inputs[1:]
    factors = factors_of(count)
    groups = (Smoothing(layers, 0.5, factors, Numbers(1.0, 0, "int8")),)
    names = named(lasting, recording.externals, names_of(model))
    editor = passes.as_calibrated(steps, lasting)
    plain = dict.fromkeys(layers, Layer(None))
    smoothing.smooth(editor, Quantization(Layers(plain, groups), names))
    assert any(each.tolist() == torch.tensor(factors).tolist() for each in steps.constants.values())
    with torch.no_grad():
        results, _ = steps.program()([data[0], *recording.externals])
    assert error(results[0], run(model, data[0])) < 1e-5


def test_a_layer_left_in_floating_numbers_takes_the_divided_value_with_its_own_weight() -> None:
    model = outliers()
    prepared = calibrated(model, TOKENS, SMOOTH)
    quantized = convert(prepared, recipe_of(prepared).set("query", "float"))
    assert error(run(quantized, TOKENS[0]), run(model, TOKENS[0])) < 0.01


def test_smoothing_in_bfloat16() -> None:
    model = outliers()
    quantized = quantize(model, TOKENS, SMOOTH, dtype=torch.bfloat16)
    assert error(run(quantized, TOKENS[0]), run(model, TOKENS[0])) < 0.02


def test_smoothed_weights_follow_writes() -> None:
    model = outliers()
    quantized = quantize(model, TOKENS, SMOOTH)
    with torch.no_grad():
        for each in (model, quantized):
            each.norm.weight.mul_(0.7)
            each.up.weight.mul_(0.5)
    assert error(run(quantized, TOKENS[0]), run(model, TOKENS[0])) < 0.02
    back = oxytorch.undo(quantized)
    assert torch.equal(run(back, TOKENS[0]), run(model, TOKENS[0]))
    assert back.state_dict().keys() == model.state_dict().keys()


def test_a_file_of_a_smoothed_model_gives_the_same_results(tmp_path: Path) -> None:
    quantized = quantize(outliers(), TOKENS, SMOOTH)
    path = tmp_path / "model.oxy"
    oxytorch.save(quantized, path, sample_input=TOKENS[0])
    assert error(oxytorch.load(path)(TOKENS[1]), run(quantized, TOKENS[1])) < 1e-5


def test_factors_are_written_read_and_used_again(tmp_path: Path) -> None:
    model, path = outliers(), tmp_path / "recipe.json"
    quantized = quantize(model, TOKENS, SMOOTH)
    save_recipe(recipe_of(quantized), path)
    again = load_recipe(path)
    assert again == recipe_of(quantized)
    other = convert(model, again, example_inputs=TOKENS[0])
    assert torch.equal(run(other, TOKENS[1]), run(quantized, TOKENS[1]))
    data = json.loads(path.read_text())
    del data["smoothing"]  # upon which layers take what they took without
    path.write_text(json.dumps(data))
    plain = convert(model, load_recipe(path), example_inputs=TOKENS[0])
    assert torch.equal(run(plain, TOKENS[1]), run(quantize(model, TOKENS), TOKENS[1]))


def test_copies_of_a_prepared_model_find_the_same_factors() -> None:
    prepared = calibrated(outliers(), TOKENS, SMOOTH)
    wanted = recipe_of(prepared)
    assert recipe_of(copy.deepcopy(prepared)) == wanted
    assert recipe_of(pickle.loads(pickle.dumps(prepared))) == wanted


class TwoWays(nn.Module):
    """A layer behind a normalization for even batches, without one for others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.norm(x) if len(x) % 2 == 0 else x)
        return result


def test_calls_in_which_a_layer_cannot_be_smoothed_use_its_own_range() -> None:
    torch.manual_seed(0)
    model = TwoWays().eval()
    with torch.no_grad():
        model.norm.weight[3] *= 40
        model.layer.weight[:, 3] /= 40
    data = [torch.randn(64, 64) for _ in range(4)]
    quantized = quantize(model, data, SMOOTH)
    assert smoothed(quantized)[("layer",)].factors
    assert error(run(quantized, data[0]), run(model, data[0])) < 0.03
    odd = torch.randn(63, 64)
    assert error(run(quantized, odd), run(model, odd)) < 0.3  # in steps for what is 40 times larger


def test_factors_that_gain_nothing_are_left_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    rows = [torch.rand(256, 64).sub(0.5).sign() for _ in range(4)]  # of channels of one size
    with torch.no_grad():
        model[1].weight.copy_(torch.rand(64, 64).sub(0.5).sign())
    found = smoothed(quantize(model, rows, SMOOTH))[("1",)]
    assert found.why == "no factors lower its error by a tenth" and not found.factors


class Refused(nn.Module):
    """A layer behind what does not let factors through, by its name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.norm, self.layer = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "squared":
            x = x * x
        elif self.how == "keys":
            parts = x.view(2, -1, 4, 16).transpose(1, 2)
            query = torch.ones_like(parts)
            mixed = nn.functional.scaled_dot_product_attention(query, parts, parts)
            x = mixed.transpose(1, 2).reshape(x.shape)
        elif self.how == "shared":
            return torch.cat([self.layer(x), x], -1)
        elif self.how == "turned":  # channels are not those of the layer before
            x = x.reshape(-1, 8, 8).transpose(1, 2).reshape(x.shape)
        elif self.how == "sum":
            x = x + 1
        elif self.how == "clamped":
            x = x.clamp(0, 6)
        result: Tensor = self.layer(x)
        return result


@pytest.mark.parametrize("how", ["squared", "keys", "shared", "turned", "sum", "clamped"])
def test_what_lets_no_factors_through_is_refused(how: str) -> None:
    prepared = prepare(Refused(how).eval(), SMOOTH, TOKENS[0])
    prepared(TOKENS[0])
    groups = {each.layers: each for each in recipe_of(prepared).smoothing}
    assert groups[("layer",)].why and not groups[("layer",)].factors


def test_other_observers_choose_factors_too() -> None:
    model = outliers()
    for observer in ("moving_average", "percentile", "mse", "kl"):
        config = Int8StaticActivationInt8Weight(observer=observer, smooth=True)
        quantized = quantize(model, TOKENS, config)
        assert error(run(quantized, TOKENS[0]), run(model, TOKENS[0])) < 0.03, observer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(smoothing={}), "expected smoothing to be a list"),
        (lambda d: d["smoothing"][0].update(layers=["nothing"]), "expected layers of the recipe"),
        (lambda d: d["smoothing"][0].update(more=1), "expected layers of the recipe"),
        (lambda d: d["smoothing"][0].update(alpha=2), "alpha from 0 to 1 .* got 2"),
        (lambda d: d["smoothing"][0]["factors"].append(0), "expected positive factors"),
        (lambda d: d["smoothing"][0]["factors"].append(float("inf")), "expected positive factors"),
        (lambda d: d["smoothing"][0].pop("input"), "expected input with factors"),
        (lambda d: d["smoothing"][0]["input"].update(scale=0), "for the input of 'query', 'key'"),
    ],
)
def test_damaged_factors_are_refused(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.json"
    save_recipe(recipe_of(quantize(outliers(), TOKENS, SMOOTH)), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_factors_that_do_not_fit_the_model_are_refused() -> None:
    model = PreNorm().eval()
    recipe = recipe_of(quantize(model, TOKENS))
    numbers = Numbers(0.1, 0, "int8")
    for layers, count, message in (
        (("query", "key"), 64, "there is no value that these layers take, and no others"),
        (("up",), 63, "it has 64 channels, and there are 63 factors"),
        (("down",), 256, "aten::gelu before it lets no factors through"),
    ):
        wrong = Recipe("PreNorm", recipe.layers, [Smoothing(layers, 0.5, (2.0,) * count, numbers)])
        with pytest.raises(ValueError, match=message):
            convert(model, wrong, example_inputs=TOKENS[0])
    with pytest.raises(TypeError, match="expected smooth True or False, got 1"):
        Int8StaticActivationInt8Weight(smooth=1)  # type: ignore[arg-type]
