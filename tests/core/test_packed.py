"""What code does with a parameter: a packed one answers as nn.Parameter does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.ops.linear import PackedLinearWeight

pytestmark = pytest.mark.usefixtures("pack_small_layers")


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    return stock, oxytorch.optimize(stock)


def test_keep_vars_gives_the_parameters_themselves(models: tuple[nn.Module, nn.Module]) -> None:
    _, model = models
    state = model.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(3, 16)).sum().backward()
    torch.optim.SGD([*state.values()], 0.1).step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_class_makes_plain_parameters(
    models: tuple[nn.Module, nn.Module], requires_grad: bool
) -> None:
    weight = models[1][0].weight
    made = type(weight)(torch.ones(2, 3), requires_grad=requires_grad)
    assert type(made) is nn.Parameter
    assert made.requires_grad is requires_grad
    assert torch.equal(made, torch.ones(2, 3))


def test_it_is_printed_as_a_parameter(models: tuple[nn.Module, nn.Module]) -> None:
    stock, model = models
    assert repr(model[0].weight) == repr(stock[0].weight)
    assert repr(model[0].weight.detach()) == repr(stock[0].weight.detach())


def test_numpy_asks_whether_gradients_are_enabled(models: tuple[nn.Module, nn.Module]) -> None:
    stock, model = models
    with torch.no_grad():
        assert (model[0].weight.numpy() == stock[0].weight.numpy()).all()
    with pytest.raises(RuntimeError, match="requires grad"):
        model[0].weight.numpy()


@pytest.mark.parametrize("stays", [False, True], ids=["cleared", "held"])
def test_autocast_refers_weakly_to_a_parameter_that_is_replaced(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    model, x = copy.deepcopy(stock), torch.randn(3, 16)
    if stays:  # as what else refers weakly to a tensor in C++
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    before = [*model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # outside no_grad autocast keeps what it converted
        oxytorch.optimize(model, inplace=True)
        assert isinstance(model[0].weight, PackedTensor)
        if not stays:
            assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        torch.testing.assert_close(model(x), stock(x))
        oxytorch.undo(model)
    assert {type(p) for p in (*model.parameters(), *before)} == {nn.Parameter}
    for parameter, source in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(parameter, source)


def _double(value: float) -> float:
    return value * 2


WAYS: dict[str, Callable[[Tensor], object]] = {
    "apply_": lambda w: w.detach().apply_(_double),
    "apply_ of data": lambda w: w.data.apply_(_double),
    "map_": lambda w: w.detach().map_(torch.ones_like(w), lambda a, _: 2 * a),
    "set_": lambda w: torch.empty(0).set_(w.detach()).mul_(2),
    "unsafe_split": lambda w: [part.mul_(2) for part in w.unsafe_split(1)],
    "unsafe_split_with_sizes": lambda w: [p.mul_(2) for p in w.unsafe_split_with_sizes([1, 2])],
    "unsafe_chunk": lambda w: [part.mul_(2) for part in w.unsafe_chunk(2)],
    "_unsafe_view": lambda w: torch.ops.aten._unsafe_view(w, [-1]).mul_(2),
    "copy.copy": lambda w: copy.copy(w).mul_(2),
    "copy.copy of an alias": lambda w: copy.copy(w.detach()).mul_(2),
    "DLPack": lambda w: torch.from_dlpack(w.detach()).mul_(2),
}
"""Writes, some of them by operators whose schemas do not say that they share memory."""


@pytest.mark.parametrize("way", WAYS)
def test_untold_writes_reach_the_weight(way: str) -> None:
    layer = nn.Linear(5, 3)
    expected = 2 * layer.weight.detach()
    layer.weight = PackedLinearWeight(layer.weight.detach(), in_panels=True).as_parameter(True)
    with torch.no_grad():
        WAYS[way](layer.weight)
        torch.testing.assert_close(layer.weight.detach().clone(), expected)
        torch.testing.assert_close(layer(torch.eye(5)), expected.t() + layer.bias)


@pytest.mark.parametrize(
    "read",
    [
        torch.utils.dlpack.to_dlpack,
        Tensor.data_ptr,
        lambda w: torch.ones(3, 5).map_(w, lambda a, _: a),
        lambda w: Tensor.apply_(w, _double),
    ],
)
def test_code_below_python_gets_an_error_and_no_memory(read: Callable[[Tensor], object]) -> None:
    weight = PackedLinearWeight(torch.randn(3, 5), in_panels=True)
    with pytest.raises(RuntimeError, match=r"data pointer|not supported"):
        read(weight)


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_functions_of_elements_want_no_gradient(name: str) -> None:
    weight = PackedLinearWeight(torch.randn(3, 5), in_panels=True).as_parameter(True)
    given = (_double,) if name == "apply_" else (torch.ones(3, 5), max)
    with pytest.raises(RuntimeError, match=f"Can't call {name}"):
        getattr(weight, name)(*given)
