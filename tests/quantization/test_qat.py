"""Quantization-aware training: what training sees is what `convert` makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import Block, Residual, error, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import oxytorch
from oxytorch.ops.panels import layout
from oxytorch.quantization import (
    Int8StaticActivationInt8Weight,
    LayerRecipe,
    Recipe,
    convert,
    freeze_batch_norms,
    freeze_ranges,
    load_recipe,
    prepare,
    prepare_qat,
    quantize,
    recipe_of,
    save_recipe,
)
from oxytorch.quantization.static.fake import integers_of

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(0))
Optimizer = Callable[..., Any]


def train(
    model: nn.Module, x: Tensor, steps: int = 4, optimizer: Optimizer = torch.optim.SGD
) -> None:
    """Steps towards zeros, on inputs about as large as x."""
    model.train()
    rule = optimizer(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rule.zero_grad()
        model(torch.randn(x.shape, generator=random)).square().mean().backward()
        rule.step()
    model.eval()


class Frozen(nn.Module):
    """A shortcut from what a sum gives, written to in place, and a convolution of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16, affine=False)
        self.second = nn.Conv1d(16, 16, 3, padding=1, padding_mode="circular")
        self.third, self.head = nn.Conv1d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x + F.relu(self.second(x))
        y = self.third(x)
        y += x
        found: Tensor = self.head(y.mean(2))
        return found


SEQUENCES = torch.randn(4, 8, 20, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, oxytorch.optim.AdamW])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("make", "x"), [(Residual, IMAGES), (Block, TOKENS), (Frozen, SEQUENCES)])
def test_the_converted_model_computes_what_training_saw(
    make: Callable[[], nn.Module], x: Tensor, symmetric: bool, optimizer: Optimizer
) -> None:
    torch.manual_seed(0)
    config = Int8StaticActivationInt8Weight(symmetric, "moving_average")
    model = prepare_qat(make(), config, x)
    train(model, x, optimizer=optimizer)
    converted = convert(model)
    assert type(converted) is make
    # Sums are exact there and float32 here: a number in the middle may be rounded to either side.
    assert error(run(converted, x), run(model, x)) < 2e-3
    layers = sum(isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d) for m in model.modules())
    found: Any = converted.forward
    assert str(found.programs()[0]).count("oxytorch::quantized_") == layers


def test_the_integers_are_those_that_training_saw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prepare_qat(Residual(), None, IMAGES)
    train(model, IMAGES)
    oxytorch.save(convert(model), tmp_path / "model.oxy", sample_input=IMAGES)
    held = oxytorch.load(tmp_path / "model.oxy").program.constants
    for layer, norm in ((model.last, model.last_norm), (model.head, None)):
        weight = layer.weight.detach().flatten(1)
        if norm is not None:
            weight = weight * (torch.rsqrt(norm.running_var + norm.eps) * norm.weight)[:, None]
        integers, scales = integers_of(weight.detach())
        assert integers.abs().max() == 127
        packed = layout.pack("int8", integers.to(torch.int8).view(torch.uint8))
        assert any(torch.equal(packed, each) for each in held if each.shape == packed.shape)
        assert any(_begins_with(each, scales.flatten()) for each in held)


def _begins_with(held: Tensor, wanted: Tensor) -> bool:
    is_one = held.dtype == torch.float32 and held.dim() == 1 and len(held) >= len(wanted)
    return is_one and torch.equal(held[: len(wanted)], wanted)


def test_training_recovers_what_rounding_lost() -> None:
    """Units of very different sizes share a range, in which most of them have few steps."""
    torch.manual_seed(0)
    (x, y), (other_x, other_y) = _digits(10_000, 0), _digits(4000, 1)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    _fit(model, x, y, 8, 1e-3)
    sizes = torch.logspace(0, 3, 64)
    with torch.no_grad():
        for layer, after in ((model[0], model[2]), (model[2], model[4])):
            layer.weight *= sizes[:, None]
            layer.bias *= sizes
            after.weight /= sizes

    def accuracy(each: nn.Module) -> float:
        return float((run(each.eval(), other_x).argmax(1) == other_y).float().mean())

    rounded = quantize(model.eval(), [x[:500]])
    trained = prepare_qat(model, None, x[:8], recipe=recipe_of(rounded))
    _fit(trained, x, y, 6, 5e-4)
    plain, before, after = map(accuracy, (model, rounded, convert(trained.eval())))
    assert before < plain - 0.06
    assert after - before > 0.6 * (plain - before)


def _digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten patterns of 8 x 8, of any brightness, in noise."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(99))
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (count,), generator=random)
    brightness = torch.rand(count, 1, generator=random)
    return patterns[y] * brightness + 1.1 * torch.randn(count, 64, generator=random), y


def _fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    model.train()
    rule = torch.optim.Adam(model.parameters(), rate)
    for _ in range(epochs):
        for first in range(0, len(x), 100):
            batch = slice(first, first + 100)
            rule.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            rule.step()


def test_gradients_pass_through_rounding() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 8)
    model = prepare_qat(plain, None, torch.randn(4, 16))
    x = torch.randn(32, 16)
    model.train()(x)
    freeze_ranges(model)
    numbers = recipe_of(model).layers["weight"].input
    assert numbers is not None
    far = x.clone()
    far[0, 0] = 100.0
    far.requires_grad_(True)
    model(far).sum().backward()
    integers, scales = integers_of(plain.weight.detach())
    wanted = (integers * scales).sum(0).expand(32, 16).clone()
    wanted[0, 0] = 0  # beyond the range
    assert torch.allclose(far.grad, wanted, atol=1e-5)
    rounded = torch.fake_quantize_per_tensor_affine(
        far.detach(), numbers.scale, numbers.zero_point, 0, 255
    )
    assert torch.allclose(model.weight.grad, rounded.sum(0).expand(8, 16), atol=1e-3)


class Normed(nn.Module):
    """A convolution with a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(x))
        return found


def test_batch_norms_are_folded_while_they_follow_the_batch() -> None:
    torch.manual_seed(0)
    plain = Normed()
    nn.init.uniform_(plain.norm.weight, 0.5, 2)
    nn.init.uniform_(plain.norm.running_var, 0.5, 2)
    model = prepare_qat(plain, None, IMAGES).train()
    found = model(IMAGES)
    numbers = recipe_of(model).layers["layer"].input
    assert numbers is not None
    x = torch.fake_quantize_per_tensor_affine(IMAGES, numbers.scale, numbers.zero_point, 0, 255)
    factor = torch.rsqrt(plain.norm.running_var + plain.norm.eps) * plain.norm.weight
    integers, scales = integers_of((plain.layer.weight * factor.view(-1, 1, 1, 1)).detach())
    weight = integers * scales / factor.view(-1, 1, 1, 1)
    wanted = plain.train().norm(F.conv2d(x, weight, plain.layer.bias))
    assert torch.allclose(found, wanted, atol=1e-4)
    assert torch.allclose(model.norm.running_var, plain.norm.running_var, atol=1e-5)
    assert torch.allclose(model.norm.running_mean, plain.norm.running_mean, atol=1e-5)


def test_frozen_batch_norms_keep_their_statistics_and_train_their_weights() -> None:
    torch.manual_seed(0)
    model = prepare_qat(Residual(), None, IMAGES).train()
    model(IMAGES)
    freeze_batch_norms(model)
    freeze_ranges(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = model(IMAGES * 3)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    found.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.first_norm.parameters())
    assert torch.equal(found, model.eval()(IMAGES * 3))
    freeze_batch_norms(model, False)
    model.train()(IMAGES * 3)
    assert not torch.equal(before["first_norm.running_mean"], model.first_norm.running_mean)


def test_batch_norms_in_evaluation_mode_alone_are_folded() -> None:
    """As who trains with small batches does."""
    model = prepare_qat(Normed(), None, IMAGES)
    model.train()
    model.norm.eval()
    found = model(IMAGES)
    assert torch.equal(found, model.eval()(IMAGES))


def test_factors_of_zero_are_no_harm() -> None:
    model = prepare_qat(Normed(), None, IMAGES).train()
    with torch.no_grad():
        model.norm.weight[:4] = 0
    found = model(IMAGES)
    (found * torch.randn_like(found)).sum().backward()
    assert found.isfinite().all() and model.layer.weight.grad.isfinite().all()
    assert model.norm.weight.grad[:4].any()


def test_ranges_follow_training_alone_and_until_they_are_frozen() -> None:
    model = prepare_qat(Block(), None, TOKENS).train()
    model(TOKENS)
    seen = recipe_of(model)
    model.eval()(TOKENS * 9)
    assert recipe_of(model) == seen
    model.train()(TOKENS * 9)
    wider = recipe_of(model)
    assert wider.layers["up"].input != seen.layers["up"].input
    freeze_ranges(model)
    model(TOKENS)
    assert recipe_of(model) == wider


def test_the_original_is_left_alone_and_names_stay() -> None:
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = prepare_qat(model, None, IMAGES)
    assert training.training and type(training) is Residual
    train(training, IMAGES)
    assert model.state_dict().keys() == training.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.load_state_dict(training.state_dict())


def test_training_goes_on_from_a_recipe_and_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prepare_qat(Residual(), None, IMAGES)
    train(model, IMAGES)
    save_recipe(recipe_of(model), tmp_path / "ranges.json")
    plain = Residual()
    plain.load_state_dict(model.state_dict())
    again = prepare_qat(plain, None, IMAGES, recipe=load_recipe(tmp_path / "ranges.json")).eval()
    assert torch.equal(run(again, IMAGES), run(model, IMAGES))
    # The same integers without training at all.
    converted = convert(plain.eval(), recipe_of(model), example_inputs=IMAGES)
    assert torch.equal(run(converted, IMAGES), run(convert(model), IMAGES))


def test_recipes_say_how_layers_train() -> None:
    model = Block().eval()
    prepared = prepare(model, Int8StaticActivationInt8Weight(), TOKENS)
    prepared(TOKENS)
    recipe = recipe_of(prepared).set("up", "float").set("down", "dynamic")
    training = prepare_qat(model, None, TOKENS, recipe=recipe)
    train(training, TOKENS)
    own = recipe_of(training).layers
    assert [own[name].compute for name in ("query", "up", "down")] == ["static", "float", "dynamic"]
    converted = convert(training)
    assert error(run(converted, TOKENS), run(training, TOKENS)) < 2e-3
    assert [entry.module for entry in oxytorch.explain(converted).skipped] == ["up"]


class Mixed(nn.Module):
    """Layers that training can look into, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.own, self.twice, self.once = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.twice(F.relu(self.twice(F.linear(x, self.own.weight))))
        found: Tensor = self.once(x)
        return found


def test_what_training_cannot_look_into_stays_float_and_says_why() -> None:
    x = torch.randn(3, 5, 16)
    model = prepare_qat(Mixed(), None, x)
    train(model, x)
    layers = recipe_of(model).layers
    assert layers["own"].compute == "float" and "other code takes its weight" in layers["own"].why
    outside = [own.why for name, own in layers.items() if name.startswith("attention")]
    assert outside and all("cannot look" in why for why in outside)
    assert layers["twice"].compute == layers["twice#2"].compute == "static"
    assert layers["twice"].input == layers["twice#2"].input
    assert error(run(convert(model), x), run(model, x)) < 2e-3


def test_copies_train_by_themselves() -> None:
    model = prepare_qat(Residual(), None, IMAGES)
    train(model, IMAGES)
    other = copy.deepcopy(model)
    assert torch.equal(run(other, IMAGES), run(model, IMAGES))
    before, wanted = recipe_of(model), run(model, IMAGES)
    train(other, IMAGES * 5)
    assert recipe_of(model) == before and recipe_of(other) != before
    assert torch.equal(run(model, IMAGES), wanted)


class Saving(nn.Module):
    """Two layers, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.saves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.saves and self.training:
            found: Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return found
        found = self.layers(x)
        return found


def test_activations_may_be_computed_again_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    model = prepare_qat(Saving(), None, x).train()
    model(x)
    freeze_ranges(model)
    gradients = []
    for model.saves in (False, True):
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_autocast_trains() -> None:
    model = prepare_qat(Residual(), None, IMAGES).train()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(IMAGES)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    assert model.first.weight.grad.isfinite().all()
    assert run(convert(model.eval()), IMAGES).isfinite().all()


@pytest.mark.parametrize(("make", "x"), [(Residual, IMAGES), (Normed, IMAGES)])
def test_compiled_models_train_the_same(make: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    model = prepare_qat(make(), None, x).train()
    model(x)
    freeze_ranges(model)
    freeze_batch_norms(model)
    gradients = []
    for each in (model, torch.compile(model, backend="eager")):
        model.zero_grad()
        each(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert all(map(torch.allclose, *gradients))


def test_bad_input_is_refused() -> None:
    model = Residual()
    config = Int8StaticActivationInt8Weight()
    with pytest.raises(TypeError, match=r"prepare_qat: expected model to be a torch\.nn\.Module"):
        prepare_qat(3, config, IMAGES)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="prepare_qat: expected config to be Int8Static"):
        prepare_qat(model, "int8", IMAGES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prepare_qat: expected recipe to be a Recipe, got dict"):
        prepare_qat(model, config, IMAGES, recipe={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a recipe for this model, a Residual, got one"):
        recipe = Recipe("Block", {"norm": LayerRecipe("dynamic")})
        prepare_qat(model, config, IMAGES, recipe=recipe)
    training = prepare_qat(model, config, IMAGES)
    with pytest.raises(ValueError, match="got one that was prepared"):
        prepare_qat(training, config, IMAGES)
    with pytest.raises(ValueError, match="in evaluation mode, got one in training mode"):
        convert(training)
    with pytest.raises(ValueError, match="saw no data; train it first"):
        convert(training.eval())
    with pytest.raises(ValueError, match="finite values in the input of layer first, got NaN"):
        training.train()(torch.full_like(IMAGES, float("nan")))
    with pytest.raises(ValueError, match=r"freeze_ranges: expected a model that .*prepare_qat"):
        freeze_ranges(model)
    with pytest.raises(TypeError, match="freeze_batch_norms: expected frozen to be True or False"):
        freeze_batch_norms(training, 1)  # type: ignore[arg-type]


class Reads(nn.Module):
    """Draws a number in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * torch.rand(1)
        return found


def test_a_model_that_cannot_be_captured_says_why() -> None:
    with pytest.raises(ValueError, match=r"prepare_qat: Reads cannot be captured: .*random"):
        prepare_qat(Reads(), None, torch.randn(2, 8))


def test_smoothing_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    config = Int8StaticActivationInt8Weight(smooth=True)
    with pytest.raises(ValueError, match="a config and a recipe without smoothing"):
        prepare_qat(model, config, x)


class Summed(nn.Module):
    """What a layer takes is added behind its activation, and made by another layer."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        result: Tensor = self.last(x + self.activation(self.inner(x)))
        return result


@pytest.mark.parametrize("activation", [F.relu, F.silu, lambda x: x])
def test_a_sum_of_what_a_layer_takes_is_rounded_once(activation: Any) -> None:
    torch.manual_seed(0)
    training, size = prepare_qat(Summed(activation), None, torch.randn(2, 16, 9, 9)), (2, 16, 9, 9)
    training.train()
    for _ in range(3):
        training(torch.randn(size))
    x = torch.randn(size)
    with torch.no_grad():
        found, wanted = convert(training.eval())(x), training(x)
    assert ((found - wanted).abs() > 1e-5).float().mean() < 0.02
