"""The report of a quantized model: errors of its layers and of the whole, shares, times, plots."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from int8_models import Block, Chain, PreNorm, Residual, calibrated, with_outliers
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.ops._quantized import from_bytes, to_bytes
from oxytorch.quantization import (
    ErrorReport,
    Int8StaticActivationInt8Weight,
    LayerError,
    convert,
    quantize,
    recipe_of,
    report,
)

_SEEDS = [torch.Generator().manual_seed(number) for number in range(4)]
ROWS = [torch.randn(6, 40, generator=each) for each in _SEEDS]
TOKENS = [torch.randn(2, 9, 64, generator=each) for each in _SEEDS]
IMAGES = [torch.randn(2, 3, 32, 32, generator=each) for each in _SEEDS]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 10)).eval()


def by_name(found: ErrorReport) -> dict[str, LayerError]:
    return {layer.module: layer for layer in found.layers}


def decibels(wanted: list[Tensor], found: list[Tensor]) -> float:
    error = sum(float((a - b).double().square().sum()) for a, b in zip(wanted, found, strict=True))
    return 10 * math.log10(sum(float(a.double().square().sum()) for a in wanted) / error)


def rounded(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def test_errors_of_layers_are_those_of_each_layer_alone() -> None:
    model = small()
    quantized = quantize(model, ROWS)
    found = by_name(report(model, quantized, ROWS))
    taken = ROWS
    for name in ("0", "2"):
        layer, numbers = model.get_submodule(name), recipe_of(quantized).layers[name].input
        assert isinstance(layer, nn.Linear) and numbers is not None
        own = numbers.scale, numbers.zero_point
        near = [
            from_bytes(to_bytes(x, *own, numbers.torch_dtype), *own, torch.float32) for x in taken
        ]
        given = [layer(x).detach() for x in taken]
        other = [F.linear(x, rounded(layer.weight), layer.bias).detach() for x in near]
        assert found[name].compute == "static"
        assert found[name].input_sqnr == pytest.approx(decibels(taken, near), abs=1e-3)
        assert found[name].sqnr == pytest.approx(decibels(given, other), abs=1e-3)
        taken = [torch.relu(y) for y in given]
    assert found["0"].products == 4 * 6 * 40 * 24 and found["2"].products == 4 * 6 * 24 * 10


def test_the_whole_model_is_compared_too() -> None:
    model = small()
    quantized = quantize(model, ROWS)
    with torch.no_grad():
        wanted, given = ([each(x) for x in ROWS] for each in (model, quantized))
    found = report(model, quantized, ROWS)
    assert found.sqnr == pytest.approx(decibels(wanted, given), abs=1e-6)
    together = [torch.cat(each).flatten().double() for each in (wanted, given)]
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(*together, dim=0)))
    assert found.calls == 4 and found.int8_share == 1


def test_layers_say_how_they_are_computed() -> None:
    model = Block().eval()
    prepared = calibrated(model, TOKENS)
    recipe = recipe_of(prepared).set("up", "float").set("down", "dynamic")
    found = report(model, convert(prepared, recipe), TOKENS)
    layers = by_name(found)
    assert {name: each.compute for name, each in layers.items()} == {
        "query": "static", "key": "static", "value": "static", "out": "static", "up": "float",
        "down": "dynamic",
    }  # fmt: skip
    assert found.layers[-1].module == "up" and layers["up"].sqnr is None
    assert found.int8_share == pytest.approx(8 / 12)
    down = layers["down"]
    assert down.sqnr is not None and down.input_sqnr is not None
    assert 35 < down.sqnr < down.input_sqnr + 1
    errors = [each.sqnr for each in found.layers[:-1]]
    assert errors == sorted(errors, key=lambda value: value or 0)
    text = str(found)
    assert "66.7% of the products" in text and text.splitlines()[-1].split()[:2] == ["up", "float"]


@pytest.mark.parametrize("model", [Residual(), Chain()], ids=["residual", "chain"])
def test_convolutions_are_compared_with_all_that_can_be_around_them(model: nn.Module) -> None:
    model.eval()
    config = Int8StaticActivationInt8Weight(smooth=True)
    found = report(model, quantize(model, IMAGES, config), IMAGES)
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert by_name(found).keys() == names
    of_integers = [each for each in found.layers if each.compute != "float"]
    assert names - {each.module for each in of_integers} <= {"depthwise", "each"}
    assert all(each.sqnr is not None and each.sqnr > 25 for each in of_integers)
    assert found.sqnr > 25


def test_smoothing_is_seen_in_the_errors_of_layers() -> None:
    torch.manual_seed(0)
    model = with_outliers(PreNorm()).eval()
    plain, smooth = (
        by_name(report(model, quantize(model, TOKENS, config), TOKENS))
        for config in (
            Int8StaticActivationInt8Weight(),
            Int8StaticActivationInt8Weight(smooth=True),
        )
    )
    for name in ("query", "key", "value", "up"):
        before, after = plain[name].sqnr, smooth[name].sqnr
        assert before is not None and after is not None and after > before + 15
    assert plain["down"].sqnr == pytest.approx(smooth["down"].sqnr, abs=0.01)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.same = nn.ConvTranspose2d(3, 4, 2, 2), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.same(self.grow(x))
        return result


def test_layers_that_cannot_multiply_integers_count_for_the_share() -> None:
    model = Transposed().eval()
    found = report(model, quantize(model, IMAGES), IMAGES)
    layers = by_name(found)
    assert layers["grow"].compute == "float" and layers["grow"].why == "it is transposed"
    assert layers["grow"].products == 4 * 2 * 32 * 32 * 3 * 4 * 4
    assert layers["same"].products == 4 * 2 * 64 * 64 * 4 * 4
    assert found.int8_share == pytest.approx(4 / 7)


def test_calls_of_other_sizes_and_dtypes_are_added_up() -> None:
    model = Block().eval()
    quantized = quantize(model, TOKENS, dtype=torch.bfloat16)
    found = report(model, quantized, [TOKENS[0], torch.randn(1, 5, 64)])
    assert by_name(found)["query"].products == (18 + 5) * 64 * 64
    assert found.sqnr > 25


def test_times_are_taken_when_asked_for() -> None:
    model = small()
    quantized = quantize(model, ROWS)
    assert report(model, quantized, ROWS).original_seconds is None
    found = report(model, quantized, ROWS, times=True)
    assert found.original_seconds is not None and found.quantized_seconds is not None
    assert found.original_seconds > 0 and found.quantized_seconds > 0
    assert "a call takes" in str(found)


def test_a_report_is_plain_data() -> None:
    found = report(small(), quantize(small(), ROWS), ROWS)
    again = json.loads(json.dumps(found.as_dict()))
    assert again["layers"][0]["sqnr"] == found.layers[0].sqnr and again["int8_share"] == 1


def test_a_plot_is_drawn_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(small(), quantize(small(), ROWS), ROWS)
    pytest.importorskip("matplotlib")
    for name in ("errors.png", "errors.svg"):
        found.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    nothing = ErrorReport("Nothing", 1, [LayerError("a", "float", None, None, 1)], math.inf, 1.0)
    with pytest.raises(ValueError, match="expected a layer with an error"):
        nothing.plot(tmp_path / "nothing.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot(tmp_path / "more.png")


def test_bad_input_is_refused() -> None:
    model = small()
    quantized = quantize(model, ROWS)
    with pytest.raises(ValueError, match="expected data with at least one input"):
        report(model, quantized, [])
    with pytest.raises(TypeError, match="expected data to be a list of inputs, got a Tensor"):
        report(model, quantized, ROWS[0])
    with pytest.raises(ValueError, match="that was neither prepared nor converted"):
        report(model, model, ROWS)
    with pytest.raises(ValueError, match="not optimized yet"):
        report(quantized, quantized, ROWS)
    with pytest.raises(
        ValueError, match=r"that was quantized, a Sequential with layer .0., got a Block"
    ):
        report(Block().eval(), quantized, TOKENS)
    other = nn.Sequential(nn.Linear(40, 10)).eval()
    with pytest.raises(ValueError, match=r"a Sequential with layer .2., got a Sequential"):
        report(other, quantized, ROWS)
    with pytest.raises(TypeError, match=r"report: expected model to be a torch\.nn\.Module"):
        report(oxytorch, quantized, ROWS)  # type: ignore[arg-type]
