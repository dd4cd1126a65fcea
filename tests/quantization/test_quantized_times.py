"""Layers stay in floating point where these are timed as faster."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from int8_models import Residual
from torch import nn

import oxytorch
from oxytorch.core.watched import PLAIN
from oxytorch.optimize import tune
from oxytorch.program.passes import quantized_times
from oxytorch.program.passes.convolution_times import Convolution
from oxytorch.program.passes.quantized_times import Times
from oxytorch.program.program import Step
from oxytorch.quantization import Int8StaticActivationInt8Weight, convert, recipe_of
from oxytorch.rewriting import measure

FASTER = "floating point is faster here"
Given = Callable[..., None]


@pytest.fixture(autouse=True)
def timed(all_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_known", {})


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Sets the times of layers, by their number, of rounding, and the whole model's with some
    floating layers, as a part of that without."""

    def set_times(times: Mapping[int, Times], rounding: float = 1e-7, whole: float = 0.9) -> None:
        def times_of(editor: object, by_rows: Mapping[Step, bool]) -> Iterator[tuple[Step, Times]]:
            for number, step in enumerate(by_rows):
                yield step, times[number]

        monkeypatch.setattr(quantized_times, "_times_of", times_of)
        monkeypatch.setattr(quantized_times, "_rounding", lambda value: rounding)
        monkeypatch.setattr(tune, "paired_runs", lambda *_: (whole, 1.0, whole))

    return set_times


def chain() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers).eval()


def computed(model: nn.Module) -> list[str]:
    return [own.compute for own in recipe_of(model).layers.values()]


DATA = [torch.randn(8, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]
GOOD, BAD = Times(3e-6, 1e-6, 1e-6), Times(2e-6, 3e-6, 3e-6)


def test_a_layer_that_loses_stays_floating_and_the_times_are_said(given: Given) -> None:
    given({0: GOOD, 1: GOOD, 2: BAD})
    model = chain()
    quantized = oxytorch.quantize(model, DATA)
    assert computed(quantized) == ["static", "static", "float"]
    note = recipe_of(quantized).layers["4"].note
    assert note == f"{FASTER}: 2.0 us, integers 3.0 us"
    assert note in str(oxytorch.explain(quantized))
    with torch.inference_mode():
        found, wanted = quantized(DATA[0]), model(DATA[0])
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_layers_stay_of_integers_where_the_whole_model_is_no_faster_without(given: Given) -> None:
    given({0: GOOD, 1: GOOD, 2: BAD}, whole=1.0)
    assert computed(oxytorch.quantize(chain(), DATA)) == ["static"] * 3


@pytest.mark.parametrize("whole", [0.9, 1.0])
def test_both_models_that_are_timed_share_their_weights(
    whole: float, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    given({0: GOOD, 1: BAD})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 37), nn.Linear(37, 32)).eval()
    found = []

    def paired(first: Callable[[], None], second: Callable[[], None], *_: object) -> object:
        first(), second()
        gc.collect()
        tensors = (each for each in gc.get_objects() if type(each) in PLAIN)
        weights = (t for t in tensors if t.dtype == torch.bfloat16 and t.shape == (37, 32))
        found.append(len({t.data_ptr() for t in weights if t.device.type == "cpu"}))
        return whole, 1.0, whole

    monkeypatch.setattr(tune, "paired_runs", paired)
    quantized = oxytorch.quantize(model, DATA, dtype=torch.bfloat16)
    assert found == [1]
    assert computed(quantized) == ["static", "float" if whole < 1 else "static"]
    text = "\n".join(map(str, quantized.forward.programs()))  # type: ignore[operator, union-attr]
    assert text.count("oxytorch::quantized_linear") == (1 if whole < 1 else 2)
    with torch.inference_mode():
        assert (quantized(DATA[0]).float() - model(DATA[0])).norm() < 0.05 * model(DATA[0]).norm()
    again = oxytorch.undo(quantized)
    assert "forward" not in again.__dict__


def test_rounding_counts_for_the_layers_that_are_given_numbers(given: Given) -> None:
    given({n: Times(2e-6, 1e-6, 1e-6) for n in range(3)}, rounding=1e-5)
    assert computed(oxytorch.quantize(chain(), DATA)) == ["float", "static", "static"]


def test_all_layers_are_taken_without_only_faster(given: Given) -> None:
    given(dict.fromkeys(range(3), BAD))
    config = Int8StaticActivationInt8Weight(only_faster=False)
    assert computed(oxytorch.quantize(chain(), DATA, config)) == ["static"] * 3
    assert computed(oxytorch.quantize(chain(), DATA)) == ["float"] * 3


def test_the_recipe_of_a_quantized_model_is_not_timed_again(given: Given) -> None:
    given({0: GOOD, 1: GOOD, 2: BAD})
    recipe = recipe_of(oxytorch.quantize(chain(), DATA))
    given(dict.fromkeys(range(3), BAD))
    again = convert(chain(), recipe, example_inputs=DATA[0])
    assert recipe_of(again) == recipe


def test_calls_of_other_sizes_follow_the_first_ones_times(given: Given) -> None:
    given({0: GOOD, 1: GOOD, 2: BAD})
    model = chain()
    quantized = oxytorch.quantize(model, DATA)
    given(dict.fromkeys(range(3), BAD))
    x = torch.randn(3, 32)
    with torch.inference_mode():
        assert (quantized(x) - model(x)).norm() < 0.05 * model(x).norm()
    assert computed(quantized) == ["static", "static", "float"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_quantized_network_is_timed_and_right(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 3, 24, 24)
    quantized = oxytorch.quantize(model, [x], dtype=dtype)
    with torch.inference_mode():
        found, wanted = quantized(x), model(x)
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()
    for own in recipe_of(quantized).layers.values():
        assert own.compute == "static" or own.note.startswith(FASTER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_rows", [False, True])
def test_times_of_linear_layers_are_of_all_ways(dtype: torch.dtype, by_rows: bool) -> None:
    x, weight = (torch.empty(*size, dtype=dtype, device="meta") for size in ((4, 70), (33, 70)))
    found = quantized_times._times_of_linear(x, weight, by_rows)
    assert found.floating > 0 and found.outer > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "shape", "groups"),
    [
        ((1, 16, 9, 9), (32, 16, 3, 3), 1),
        ((1, 16, 9, 9), (16, 1, 3, 3), 16),
        ((2, 8, 15), (24, 8, 5), 1),
        ((1, 32, 7, 7), (64, 16, 1, 1), 2),
    ],
)
def test_times_of_convolutions_are_of_all_ways(
    size: tuple[int, ...], shape: tuple[int, ...], groups: int, dtype: torch.dtype
) -> None:
    dims = len(size) - 2
    ones = (1,) * dims
    layer = Convolution(size, shape, dtype, ones, ones, ones, groups)
    found = quantized_times._times_of_convolution(layer)
    assert min(found.floating, found.inner, found.outer) > 0
    ways = quantized_times.WaysOfBytes(layer)
    assert ways.to_bytes().shape == ways.to_numbers().shape == ways.plain().shape
    assert ways.to_bytes().dtype == torch.uint8 and ways.to_numbers().dtype == dtype
