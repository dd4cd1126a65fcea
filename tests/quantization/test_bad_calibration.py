"""Data and recipes that tell too little or too much: refused, or computed in floating point."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_models import Residual, calibrated, error
from torch import Tensor, nn

from oxytorch.quantization import (
    Int8StaticActivationInt8Weight,
    Recipe,
    convert,
    prepare,
    quantize,
    recipe_of,
)

EMPTY, ZEROS = torch.zeros(0, 8), torch.zeros(4, 8)
DATA = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def in_three_steps(model: nn.Module, data: Any) -> nn.Module:
    return convert(calibrated(model, [*data]))


@pytest.mark.parametrize("data", [[EMPTY], [EMPTY, EMPTY], [{"input": EMPTY}], [(EMPTY,)]])
def test_empty_inputs_alone_are_refused(data: list[Any]) -> None:
    message = r"expected calibration_data of typical inputs, got .* saw no value in \d calls"
    with pytest.raises(ValueError, match=message):
        quantize(two_layers(), data)


def test_a_generator_that_is_used_up_is_refused() -> None:
    data = iter(DATA)
    quantize(two_layers(), data)
    with pytest.raises(ValueError, match="expected calibration_data with at least one input"):
        quantize(two_layers(), data)


@pytest.mark.parametrize("ask", [convert, recipe_of])
@pytest.mark.parametrize("data", [[], [EMPTY]])
def test_a_prepared_model_without_values_is_refused(
    ask: Callable[[nn.Module], Any], data: list[Tensor]
) -> None:
    prepared = prepare(two_layers(), None, DATA[0])
    for each in data:
        prepared(each)
    with pytest.raises(ValueError, match="call it on typical inputs first"):
        ask(prepared)


def test_one_value_alone_is_refused_where_no_layer_saw_others() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    for data in (ZEROS, torch.ones(4, 8)):
        with pytest.raises(ValueError, match=r"typical inputs, got .* saw one value alone in 1 c"):
            quantize(model, [data])


@pytest.mark.parametrize("make", [quantize, in_three_steps])
@pytest.mark.parametrize("observer", ["minmax", "moving_average", "percentile", "mse", "kl"])
def test_a_layer_that_saw_one_value_stays_floating(
    make: Callable[..., nn.Module], observer: str
) -> None:
    """Any range around it would be a guess, and clamp what the model sees later."""
    model = two_layers()
    config = Int8StaticActivationInt8Weight(observer=observer, only_faster=False)
    with pytest.warns(UserWarning, match="stays in floating point: '0'; calibrate with typical"):
        if make is quantize:
            quantized = quantize(model, [ZEROS], config)
        else:
            quantized = convert(calibrated(model, [ZEROS], config))
    layers = recipe_of(quantized).layers
    assert [layers[name].compute for name in "02"] == ["float", "static"]
    assert "one value alone" in str(recipe_of(quantized))


def test_one_constant_input_among_others_changes_nothing() -> None:
    config = Int8StaticActivationInt8Weight(only_faster=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = quantize(two_layers(), [ZEROS, *DATA, EMPTY], config)
    layers = recipe_of(quantized).layers
    assert {own.compute for own in layers.values()} == {"static"}
    with torch.no_grad():
        assert error(quantized(DATA[0]), two_layers()(DATA[0])) < 0.05


def test_a_recipe_that_lacks_layers_is_of_another_model() -> None:
    model = two_layers()
    prepared = calibrated(model, DATA)
    recipe = recipe_of(prepared)
    smaller = Recipe(recipe.model, {"0": recipe.layers["0"]})
    for given in (prepared, model):
        with pytest.raises(ValueError, match=r"of this model, a Sequential.*without '2'; to leave"):
            convert(given, smaller, example_inputs=DATA[0])


class Scaled(nn.Module):
    """A layer behind a product with a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(8, 8), nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x) * self.factor)
        return result


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("observer", ["minmax", "kl"])
def test_numbers_that_are_not_finite_name_the_layer(number: float, observer: str) -> None:
    config = Int8StaticActivationInt8Weight(observer=observer)
    data = torch.randn(4, 8)
    with pytest.raises(ValueError, match="finite values in the input of layer last"):
        quantize(Scaled(number).eval(), [data], config)
    data[2, 5] = number
    with pytest.raises(ValueError, match="finite values in the input of layer first"):
        quantize(Scaled(1.0).eval(), [data], config)


def test_after_a_refused_batch_calibration_goes_on() -> None:
    model = two_layers()
    prepared = prepare(model, None, DATA[0])
    with pytest.raises(ValueError, match="finite values"):
        prepared(torch.full((4, 8), torch.nan))
    prepared(DATA[0])
    (numbers,) = {recipe_of(prepared).layers["0"].input}
    alone = recipe_of(calibrated(model, DATA[:1])).layers["0"].input
    assert numbers == alone


def test_data_of_other_shapes_are_seen_or_refused() -> None:
    model = Residual().eval()
    images = [torch.randn(2, 3, 32, 32), torch.randn(1, 3, 40, 24), torch.randn(5, 3, 17, 33)]
    quantized = quantize(model, images)
    with torch.no_grad():
        for each in images:
            assert error(quantized(each), model(each)) < 0.1
    for bad in (torch.randn(2, 4, 32, 32), torch.randn(3, 32), torch.ones(2, 3, 32, 32).int()):
        with pytest.raises(ValueError, match="cannot be called with input 1 of calibration_data"):
            quantize(model, [images[0], bad])
