"""Static quantization: prepare, convert and quantize."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import Block, Residual, Shuffled, calibrated, error, run
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch import isa
from oxytorch.ops._quantized import from_bytes, to_bytes
from oxytorch.quantization import (
    Int8StaticActivationInt8Weight,
    LayerRecipe,
    Recipe,
    convert,
    load_recipe,
    prepare,
    quantize,
    recipe_of,
    save_recipe,
)
from tiny import Formula

IMAGES = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(6)]
TOKENS = [torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(n)) for n in range(6)]
OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl")


def programs(model: nn.Module) -> str:
    found: Any = model.forward
    return "\n".join(map(str, found.programs()))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("make", "data"), [(Residual, IMAGES), (Block, TOKENS)])
def test_a_quantized_model_is_close_to_its_own(
    make: Callable[[], nn.Module], data: list[Tensor], symmetric: bool, dtype: Any
) -> None:
    model = make().eval()
    config = Int8StaticActivationInt8Weight(symmetric=symmetric)
    quantized = quantize(model, data, config, dtype=dtype)
    assert type(quantized) is make
    assert error(run(quantized, data[0]), run(model, data[0])) < 0.05
    layers = sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    assert not oxytorch.explain(quantized).skipped
    text = programs(quantized)
    assert text.count("oxytorch::quantized_") == layers
    assert "aten::linear" not in text


def test_depthwise_convolutions_multiply_integers() -> None:
    quantized = quantize(Residual().eval(), IMAGES)
    assert recipe_of(quantized).layers["depthwise"].compute == "static"
    assert programs(quantized).count("oxytorch::quantize_per_tensor") == 2  # the input, the means


class Optional(nn.Module):
    """A layer that only some calls compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        x = self.first(x)
        return self.more(x) if more else x


def test_a_layer_that_calibration_did_not_reach_stays_floating_and_says_so() -> None:
    x = torch.randn(2, 8)
    prepared = prepare(Optional().eval(), None, {"x": x, "more": True})
    prepared(x)
    assert recipe_of(prepared).layers["more"].note == "calibration saw no input of it"
    quantized = convert(prepared)
    assert "calibration saw no input of it" in str(oxytorch.explain(quantized))
    with torch.no_grad():
        assert quantized(x, more=True).isfinite().all()


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (["2"], {"2"}),
        (["0", "4.*"], {"0", "4.0", "4.2"}),
        (("4",), {"4.0", "4.2"}),
        (["1"], set()),  # an activation, which is floating anyhow
        ([], set()),
    ],
)
def test_layers_that_are_to_be_kept_stay_floating(keep: list[str], left: set[str]) -> None:
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), head).eval()
    data = [torch.randn(8, 32) for _ in range(4)]
    config = Int8StaticActivationInt8Weight(only_faster=False)
    quantized = quantize(model, data, config, keep=keep)
    layers = recipe_of(quantized).layers
    assert {name for name, own in layers.items() if own.compute == "float"} == left
    assert error(run(quantized, data[0]), run(model, data[0])) < 0.05


@pytest.mark.parametrize("keep", ["1", "1.*", "1.0"])
def test_a_layer_is_kept_by_each_of_its_paths(keep: str) -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(
        nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.ReLU()), nn.Linear(32, 8)
    ).eval()
    data = [torch.randn(8, 32) for _ in range(4)]
    config = Int8StaticActivationInt8Weight(only_faster=False)
    layers = recipe_of(quantize(model, data, config, keep=[keep])).layers
    left = {name.partition("#")[0] for name, own in layers.items() if own.compute == "float"}
    assert left == {"0.0"}


def test_names_to_be_kept_that_fit_nothing_are_told_before_calibration() -> None:
    seen = []

    def data() -> Iterator[Tensor]:
        for _ in range(4):
            seen.append(torch.randn(8, 32))
            yield seen[-1]

    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval()
    with pytest.raises(ValueError, match=r"expected keep to name .* got 'head', .*layers are 0"):
        quantize(model, data(), keep=["head"])
    assert len(seen) == 1
    with pytest.raises(TypeError, match="expected keep to be a list of names, got '0'"):
        quantize(model, data(), keep="0")


def test_pooling_concatenation_and_channel_shuffle_move_integers() -> None:
    model = Shuffled().eval()
    quantized = quantize(model, IMAGES, Int8StaticActivationInt8Weight(only_faster=False))
    assert error(run(quantized, IMAGES[0]), run(model, IMAGES[0])) < 0.05
    text = programs(quantized)
    assert text.count("oxytorch::quantized_convolution") == 4
    assert text.count("oxytorch::quantize_per_tensor") == 1  # the input
    assert "pool" in text and "aten::cat" in text and "aten::channel_shuffle" in text
    assert "dequantize" not in text


def test_small_groups_stay_in_floating_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, groups=4)).eval()
    quantized = quantize(model, IMAGES)
    grouped = recipe_of(quantized).layers["1"]
    assert grouped.compute == "float"
    assert "fewer than 16 outputs" in grouped.why
    with pytest.raises(ValueError, match='expected "float" for 1, because integers are'):
        recipe_of(quantized).set("1", "static")


def test_the_largest_values_of_a_layer_are_those_of_bytes() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3)
    ).eval()
    quantized = quantize(model, IMAGES)
    text = programs(quantized)
    (pooled,) = [line for line in text.splitlines() if "oxytorch::pool" in line]
    assert pooled.partition(" = ")[0].count("%") == 1
    assert text.count("oxytorch::quantize_per_tensor") == 1  # the input
    assert error(run(quantized, IMAGES[0]), run(model, IMAGES[0])) < 0.05


@pytest.mark.parametrize("level", [each.name for each in isa.levels() if each.supported])
def test_every_level_gives_the_same_bytes(level: str) -> None:
    """Between layers there are bytes, and the sums of a layer are exact."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    quantized = quantize(model, IMAGES)
    wanted = run(quantized, IMAGES[1])
    with isa.use(level):
        assert torch.equal(run(quantized, IMAGES[1]), wanted)


def test_a_layer_computes_what_its_recipe_says() -> None:
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 10)).eval()
    data = [torch.randn(7, 40) for _ in range(4)]
    quantized = quantize(model, data)
    layers = recipe_of(quantized).layers
    x = data[0]
    for name, relu in (("0", True), ("2", False)):
        layer: Any = model.get_submodule(name)
        numbers = layers[name].input
        assert numbers is not None
        dtype = torch.uint8 if numbers.dtype == "uint8" else torch.int8
        x = from_bytes(
            to_bytes(x, numbers.scale, numbers.zero_point, dtype),
            numbers.scale,
            numbers.zero_point,
            torch.float32,
        )
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        x = x @ ((layer.weight / scale).round() * scale).T + layer.bias
        x = torch.relu(x) if relu else x
    assert torch.allclose(run(quantized, data[0]), x, atol=1e-5)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_observers_cover_what_they_see(observer: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    prepared = prepare(model, Int8StaticActivationInt8Weight(observer=observer), torch.ones(1, 16))
    for _ in range(4):
        prepared(torch.randn(500, 16))
    numbers = recipe_of(prepared).layers["0"].input
    assert numbers is not None
    width = 255 * numbers.scale
    assert 5 < width < 10  # normal numbers, of which the outermost may be cut


def test_observers_that_cut_are_not_led_by_one_outlier() -> None:
    values = torch.randn(100_000)
    values[0] = 1000.0
    model = nn.Sequential(nn.Linear(1000, 4)).eval()
    widths = {}
    for observer in OBSERVERS:
        config = Int8StaticActivationInt8Weight(observer=observer)
        prepared = prepare(model, config, values.view(-1, 1000))
        prepared(values.view(-1, 1000))
        numbers = recipe_of(prepared).layers["0"].input
        assert numbers is not None
        widths[observer] = 255 * numbers.scale
    assert widths["minmax"] > 1000 and widths["moving_average"] > 1000
    assert all(widths[name] < 200 for name in ("percentile", "kl")), widths


def test_the_least_error_cuts_heavy_tails() -> None:
    values = torch.distributions.StudentT(3.0).sample((1000, 64))
    model = nn.Sequential(nn.Linear(64, 4)).eval()
    errors = {}
    for observer in ("minmax", "mse"):
        config = Int8StaticActivationInt8Weight(observer=observer)
        watching = prepare(model, config, values)
        watching(values)
        numbers = recipe_of(watching).layers["0"].input
        assert numbers is not None
        scale, zero_point = numbers.scale, numbers.zero_point
        stored = to_bytes(values, scale, zero_point, torch.uint8)
        again = from_bytes(stored, scale, zero_point, torch.float32)
        errors[observer] = float((again - values).square().sum())
    assert errors["mse"] < 0.95 * errors["minmax"]


def test_integers_follow_a_write_to_the_weights() -> None:
    model = Residual().eval()
    quantized = quantize(model, IMAGES)
    with torch.no_grad():
        for each in (model, quantized):
            each.head.weight.mul_(3)
            each.first.weight.mul_(0.5)
    assert error(run(quantized, IMAGES[0]), run(model, IMAGES[0])) < 0.05


def test_other_shapes_are_quantized_at_their_first_call() -> None:
    model = Residual().eval()
    quantized = quantize(model, IMAGES)
    other = torch.randn(3, 3, 40, 24)
    first = run(quantized, other)
    assert torch.equal(first, run(quantized, other))
    assert not torch.equal(first, run(model, other))
    assert error(first, run(model, other)) < 0.05


def test_layers_may_be_left_in_floating_numbers_or_rounded_row_by_row() -> None:
    model = Block().eval()
    prepared = calibrated(model, TOKENS)
    recipe = recipe_of(prepared).set("up", "float").set("down", "dynamic")
    quantized = convert(prepared, recipe)
    text = programs(quantized)
    assert text.count("oxytorch::quantized_linear") == 5
    assert sum(" none 0 %" in line for line in text.splitlines() if "quantized_linear" in line) == 1
    assert error(run(quantized, TOKENS[0]), run(model, TOKENS[0])) < 0.05
    left = [entry.module for entry in oxytorch.explain(quantized).skipped]
    assert left == ["up"]
    with pytest.raises(ValueError, match="expected the name of a layer, got 'nothing'"):
        recipe.set("nothing", "float")
    with pytest.raises(ValueError, match="'static', 'dynamic', 'float', got 'int'"):
        recipe.set("up", "int")
    with pytest.raises(TypeError, match=r"a name or a pattern, got \['up'\]; set each"):
        recipe.set(["up"], "float")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected recipe to be a Recipe, got a Block"):
        save_recipe(model, "recipe.json")  # type: ignore[arg-type]


def test_a_recipe_can_be_written_read_and_used_again(tmp_path: Path) -> None:
    model = Residual().eval()
    quantized = quantize(model, IMAGES)
    recipe, path = recipe_of(quantized), tmp_path / "recipe.json"
    save_recipe(recipe, path)
    again = load_recipe(path)
    assert again == recipe
    other = convert(model, again, example_inputs=IMAGES[0])
    assert torch.equal(run(other, IMAGES[1]), run(quantized, IMAGES[1]))
    assert "static" in str(recipe) and "depthwise" in str(recipe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), 'expected "format": "oxytorch.recipe"'),
        (lambda d: d.update(version=9), "expected version 1"),
        (lambda d: d.update(layers=[]), "expected a model's name and layers"),
        (lambda d: d["layers"]["head"].update(compute="best"), "for head, got 'best'"),
        (lambda d: d["layers"]["head"].update(compute=[]), r"for head, got \[\]"),
        (lambda d: d["layers"]["head"]["input"].update(scale=-1), "for the input of head"),
        (lambda d: d["layers"]["head"]["input"].update(zero_point=300), "for the input of head"),
        (lambda d: d["layers"]["head"].pop("input"), 'expected "dynamic" or "float" for head'),
        (
            lambda d: d["layers"]["head"].update(bits=4),
            "expected compute, input, output, why and note",
        ),
    ],
)
def test_damaged_recipes_are_refused(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.json"
    save_recipe(recipe_of(quantize(Residual().eval(), IMAGES[:1])), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        load_recipe(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="expected a JSON file"):
        load_recipe(path)


def test_recipes_of_other_models_are_refused() -> None:
    recipe = recipe_of(quantize(Residual().eval(), IMAGES[:1]))
    with pytest.raises(ValueError, match="for this model, a Block, got one for a Residual"):
        convert(Block().eval(), recipe, example_inputs=TOKENS[0])
    other = Recipe("Block", {"norm": LayerRecipe("dynamic")})
    with pytest.raises(ValueError, match="layer 'norm', which is no layer that it runs"):
        convert(Block().eval(), other, example_inputs=TOKENS[0])


def test_bad_data_is_refused() -> None:
    model = Residual().eval()
    config = Int8StaticActivationInt8Weight()
    with pytest.raises(ValueError, match="expected calibration_data with at least one input"):
        quantize(model, [])
    with pytest.raises(TypeError, match="expected calibration_data to be a list of inputs"):
        quantize(model, IMAGES[0])
    with pytest.raises(ValueError, match="saw none; call it on typical inputs first"):
        convert(prepare(model, config, IMAGES[0]))
    for number, name in ((torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")):
        with pytest.raises(ValueError, match=f"finite values in the input of layer first.*{name}"):
            prepare(model, config, IMAGES[0])(torch.full_like(IMAGES[0], number))
    with pytest.raises(ValueError, match=r"finite values in head\.weight"):
        broken = Residual().eval()
        broken.head.weight.data[0, 0] = float("inf")
        prepare(broken, config, IMAGES[0])
    with pytest.raises(TypeError, match="config to be Int8StaticActivationInt8Weight"):
        prepare(model, Int8StaticActivationInt8Weight, IMAGES[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected observer minmax"):
        Int8StaticActivationInt8Weight(observer="best")
    with pytest.raises(ValueError, match="in evaluation mode"):
        prepare(Residual(), config, IMAGES[0])
    with pytest.raises(ValueError, match="not optimized yet"):
        prepare(quantize(model, IMAGES[:1]), config, IMAGES[0])
    with pytest.raises(ValueError, match="returned, or a recipe"):
        convert(model)


def test_an_input_that_does_not_fit_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    with pytest.raises(ValueError, match="with input 1 of calibration_data, of 1 positional and 0"):
        quantize(model, [torch.randn(2, 8), torch.randn(2, 9)])
    with pytest.raises(ValueError, match=r"input 1 of calibration_data.*finite values in the"):
        quantize(model, [torch.randn(2, 8), torch.full((2, 8), float("nan"))])


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_empty_batch_is_no_harm(place: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    data = [torch.randn(4, 8) for _ in range(3)]
    data.insert(place, torch.randn(0, 8))
    assert recipe_of(quantize(model, data)).layers["0"].compute == "static"


def test_progress_without_a_known_end_counts(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    quantize(model, (torch.randn(4, 8) for _ in range(3)), progress=True)
    shown = capsys.readouterr().err
    assert "quantizing 2 " in shown and "/0" not in shown
    assert shown.endswith("3/3 \n")


def test_a_constant_batch_is_no_harm() -> None:
    model = Residual().eval()
    with pytest.warns(UserWarning, match="one value alone in all inputs of it"):
        quantized = quantize(model, [torch.zeros(1, 3, 32, 32)])
    assert run(quantized, IMAGES[0]).isfinite().all()
    wanted = run(model, torch.zeros(1, 3, 32, 32))
    assert error(run(quantized, torch.zeros(1, 3, 32, 32)), wanted) < 0.05


class Reads(nn.Module):
    """Reads a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layer(x) * torch.rand(1)
        return result


def test_a_model_that_cannot_be_captured_says_why_and_what_else_to_do() -> None:
    model = Reads().eval()
    with pytest.raises(ValueError, match=r"Reads cannot be captured: .*random.*quantize_\(model"):
        prepare(model, Int8StaticActivationInt8Weight(), torch.randn(2, 8))


def test_undo_gives_the_own_model_back() -> None:
    model = Residual().eval()
    quantized = oxytorch.undo(quantize(model, IMAGES))
    assert torch.equal(run(quantized, IMAGES[0]), run(model, IMAGES[0]))
    assert quantized.state_dict().keys() == model.state_dict().keys()


def test_with_a_dtype_weights_are_rounded_to_it_and_stay_so() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantized = quantize(model, [torch.randn(4, 64)], dtype=torch.bfloat16)
    for name, value in quantized.state_dict().items():
        assert torch.equal(value, before[name].bfloat16())
    for name, value in oxytorch.undo(quantized).state_dict().items():
        assert torch.equal(value, before[name].bfloat16().float())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_gives_the_same_results(tmp_path: Path) -> None:
    quantized = quantize(Residual().eval(), IMAGES)
    path = tmp_path / "model.oxy"
    oxytorch.save(quantized, path, sample_input=IMAGES[0])
    loaded = oxytorch.load(path)
    assert torch.equal(loaded(IMAGES[1]), run(quantized, IMAGES[1]))


def test_a_file_holds_the_integers_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    quantized, path = quantize(model, [torch.randn(4, 512)]), tmp_path / "model.oxy"
    oxytorch.save(quantized, path, sample_input=torch.randn(4, 512))
    assert path.stat().st_size < 0.3 * sum(p.nbytes for p in model.parameters())


def test_further_sizes_are_proven_and_served_in_bytes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    made = oxytorch.quantize(model, [(torch.randn(8, 64),) for _ in range(3)])
    with torch.inference_mode():
        for batch in (2, 5, 3, 7):
            x = torch.randn(batch, 64)
            first, again = made(x), made(x)
            torch.testing.assert_close(first, again, rtol=0, atol=0)
            assert not torch.equal(first, model(x))
    assert "checked for other sizes: new ones" in "\n".join(oxytorch.explain(made).calls)


class Summed(nn.Module):
    """A shortcut around an activation, as YOLO's bottlenecks have it."""

    def __init__(self, layer: Callable[[], nn.Module], activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.inner, self.last = layer(), layer(), layer()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        result: Tensor = self.last(x + self.activation(self.inner(x)))
        return result


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(48, 48), (6, 48)),
    "convolution": (lambda: nn.Conv2d(16, 16, 3, padding=1), (2, 16, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (2, 16, 9, 9)),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "hardswish", "tanh"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_activation_before_a_sum_is_computed_with_it(kind: str, name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    make, size = LAYERS[kind]
    model = Summed(make, getattr(F, name)).eval()
    data = [torch.randn(size) for _ in range(4)]
    config = Int8StaticActivationInt8Weight(only_faster=False)
    quantized = quantize(model, data, config, dtype=dtype)
    assert error(run(quantized, data[0]), run(model, data[0])) < 0.05
    text = programs(quantized)
    assert re.search(rf'some [-.e\d]+ \d+ "{name}_add" "uint8"', text)  # of bytes
    assert text.count("oxytorch::quantize_per_tensor") == 1 and "dequantize" not in text
    assert "= add " not in text and f"aten::{name}" not in text


CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_min in place": lambda x: x.clamp_min_(0),
    "clamp_max": lambda x: x.clamp_max(1),
    "clamp_min of a tensor": lambda x: x.clamp_min(torch.tensor(0.1)),
    "clamp_max of a tensor": lambda x: torch.clamp_max(x, torch.tensor(0.5)),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp of one end": lambda x: x.clamp(min=0.0),
    "clamp of tensors": lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(1.0)),
    "clamp of a row": lambda x: x.clamp(max=x.abs().mean(1, keepdim=True)),
    "clip": lambda x: x.clip(-1, 2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "hardtanh in place": lambda x: F.hardtanh(x, 0, 6, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.0)),
    "fmin": lambda x: torch.fmin(x, torch.tensor(1.0)),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CLAMPS)
def test_layers_around_a_clamp_multiply_integers(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), Formula(CLAMPS[name]), nn.Linear(16, 16)).eval()
    data = [torch.randn(5, 32) for _ in range(4)]
    config = Int8StaticActivationInt8Weight(only_faster=False)
    quantized = quantize(model, data, config, dtype=dtype)
    assert programs(quantized).count("oxytorch::quantized_linear") == 2
    assert error(run(quantized, data[0]), run(model, data[0])) < 0.05
