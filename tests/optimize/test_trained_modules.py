"""Modules that are put into a model that is trained, and layers whose weight others make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import oxytorch
from oxytorch import optim
from oxytorch.optim.split_parameter import SplitParameter
from split_models import assert_weights, network, pair, step, weights


class Low(nn.Module):
    """A layer around another, as adapters are."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.down(x) @ self.up.t()
        return result


PUT: dict[str, Callable[[Any], Any]] = {
    "linear": lambda model: nn.Linear(8, 3),
    "without bias": lambda model: nn.Linear(8, 3, bias=False),
    "sequential": lambda model: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    "around": lambda model: Low(model.head, 8),
    "weight norm": lambda model: parametrizations.weight_norm(nn.Linear(8, 3)),
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@pytest.mark.parametrize("joins", ["group", "optimizer", "before the model", "no"])
def test_what_is_put_into_the_model_is_trained(put: Callable[[Any], Any], joins: str) -> None:
    model, optimizer = pair()
    step(model, optimizer)
    new = put(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = [p for p in new.parameters() if id(p) not in held]
    optimizers = [optimizer]
    if joins == "before the model":
        optimizer.add_param_group({"params": own})
    model.head = new
    if joins == "group":
        optimizer.add_param_group({"params": own})
    elif joins == "optimizer":
        second = torch.optim.SGD(own, lr=0.1)
        same, fused = oxytorch.optimize(model, optimizer=second, inplace=True)
        assert same is model
        optimizers.append(fused)
    before = weights(model)
    assert model(torch.randn(4, 6)).dtype == torch.bfloat16
    assert_weights(model, before)
    linear = [m for m in new.modules() if type(m) is nn.Linear and m is not model.head]
    for layer in linear:
        is_split = joins != "no" or id(layer.weight) in held
        assert (type(layer.weight) is SplitParameter) == is_split
    for seed in range(2):
        step(model, *optimizers, seed=seed)
    for name, value in model.state_dict().items():
        is_held = joins != "no" or not name.startswith("head") or name.startswith("head.inner")
        assert torch.equal(value, before[name]) != is_held, name
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    oxytorch.undo(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not any("_apply" in module.__dict__ for module in model.modules())
    assert model(torch.randn(4, 6)).dtype == torch.float32


def test_what_is_put_in_keeps_the_dtype_that_was_asked_for() -> None:
    model = network()
    wanted = {"": torch.bfloat16, "head": torch.float32}
    optimizer: Any = optim.AdamW(model.parameters())
    model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=wanted, inplace=True)
    model.head = nn.Linear(8, 3)
    optimizer.add_param_group({"params": model.head.parameters()})
    assert model(torch.randn(4, 6)).dtype == torch.float32
    assert model.head.weight.dtype == torch.float32
    step(model, optimizer)


def test_a_tied_layer_that_is_put_in_shares_the_weight() -> None:
    model, optimizer = pair()
    model.again = nn.Linear(8, 8)
    model.again.weight = model.body[3].weight
    step(model, optimizer)
    assert model.again.weight is model.body[3].weight
    found = model.again(torch.randn(2, 8))
    assert torch.equal(found, found.bfloat16().float())


def test_a_parameter_that_is_put_in_is_float32() -> None:
    model, optimizer = pair()
    model.head.weight = nn.Parameter(torch.randn(3, 8))
    optimizer.add_param_group({"params": [model.head.weight]})
    before = weights(model)
    step(model, optimizer)
    assert type(model.head.weight) is nn.Parameter
    assert type(model.head.bias) is SplitParameter
    for name in ("head.weight", "head.bias"):
        assert not torch.equal(model.state_dict()[name], before[name])


def test_a_recurrent_layer_computes_with_a_parameter_that_was_replaced() -> None:
    model: Any = nn.Sequential(nn.LSTM(6, 8))
    optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True
    )
    assert type(model[0].weight_hh_l0) is SplitParameter
    model[0].weight_ih_l0 = nn.Parameter(torch.randn(32, 6))
    twin = copy.deepcopy(model)
    x = torch.randn(5, 2, 6)
    torch.testing.assert_close(model(x)[0], twin(x)[0], rtol=0.05, atol=0.02)
    model(x)[0].float().sum().backward()
    assert model[0].weight_hh_l0.grad is not None
    assert model[0].weight_ih_l0.grad is not None


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


KINDS["symmetric"] = lambda layer: parametrize.register_parametrization(
    layer, "weight", Symmetric()
)
KINDS["scaled"] = lambda layer: parametrize.register_parametrization(layer, "weight", Scaled())


@pytest.mark.parametrize("register", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("holds", [True, False])
def test_parametrized_layers_are_trained_as_float32_ones(
    register: Callable[[nn.Module], nn.Module], bias: bool, holds: bool
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.GELU(), nn.Linear(8, 3))
    register(model[0])
    twin = copy.deepcopy(model)
    pairs = []
    for own, dtype in ((model, torch.bfloat16), (twin, None)):
        held = own.parameters() if holds else own[2].parameters()
        optimizer: Any = optim.SGD(held, lr=0.05)
        pairs.append(oxytorch.optimize(own, optimizer=optimizer, dtype=dtype, inplace=True))
    x = torch.randn(16, 8)
    for _ in range(3):
        for own, optimizer in pairs:
            optimizer.zero_grad()
            own(x).float().square().mean().backward()
            optimizer.step()
    assert model(x).dtype == torch.bfloat16
    assert model[0].weight.dtype == torch.float32
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0.02, atol=0.01)
    torch.testing.assert_close(model(x).float(), twin(x), rtol=0.05, atol=0.02)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x).float(), twin(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("register", KINDS.values(), ids=KINDS)
def test_parametrizations_of_split_weights_are_refused_before_anything_changes(
    register: Callable[[nn.Module], nn.Module],
) -> None:
    model, optimizer = pair()
    step(model, optimizer)
    wanted, keys = weights(model), [*model.state_dict()]
    with pytest.raises(TypeError, match=r"before oxytorch\.optimize, or call oxytorch\.undo"):
        register(model.body[3])
    assert [*model.state_dict()] == keys
    assert_weights(model, wanted)
    # The remedy.
    oxytorch.undo(model)
    register(model.body[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    step(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*")
def test_weights_that_hooks_make_are_used() -> None:
    model, optimizer = pair()
    twin = copy.deepcopy(model)
    for own in (model, twin):
        nn.utils.weight_norm(own.head)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in held]})
    before = weights(model)
    x = torch.ones(4, 6)
    torch.testing.assert_close(model(x), twin(x), rtol=0.05, atol=0.02)
    step(model, optimizer)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter.detach(), before[name]), name


class ByHand(nn.Module):
    """Multiplies float32 inputs with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 8) / 2)
        self.second = nn.Parameter(torch.randn(8, 8) / 2)
        self.bias = nn.Parameter(torch.randn(8))
        self.kernel = nn.Parameter(torch.randn(8, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x @ self.first, self.second, bias=self.bias)
        x = nn.functional.conv1d(x.unsqueeze(0).mT, self.kernel, padding=1, groups=8).mT
        return torch.einsum("bsi,ij->bsj", x, self.second) * self.bias


def test_weights_that_the_author_multiplies_by_hand_meet_float32_inputs() -> None:
    torch.manual_seed(0)
    model: Any = ByHand()
    twin = copy.deepcopy(model)
    optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True
    )
    x = torch.randn(5, 6)
    for own in (model, twin):
        own(x).float().square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        usual = twin(x).float()
    wanted = twin(x)
    assert (model(x).float() - wanted).norm() <= 1.5 * (usual - wanted).norm()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad.float() - other.grad).norm() <= 0.05 * other.grad.norm() + 1e-3


def test_pruned_weights_keep_every_bit() -> None:
    model, optimizer = pair()
    step(model, optimizer)
    wanted = weights(model)["body.3.weight"]
    prune.l1_unstructured(model.body[3], "weight", 0.5)
    mask = model.body[3].weight_mask
    step(model, optimizer)
    after = weights(model)["body.3.weight_orig"]
    assert not torch.equal(after, wanted)
    prune.remove(model.body[3], "weight")
    assert torch.equal(model.body[3].weight.detach(), after * mask)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_with_a_parametrized_layer_is_the_plain_one(backend: str) -> None:
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    parametrizations.weight_norm(model[0])
    optimizer: Any = optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = oxytorch.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True
    )
    x = torch.randn(4, 8)
    wanted = model(x)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), wanted)
    torch._dynamo.reset()
