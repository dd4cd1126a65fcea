"""Parameter groups are torch's: any iterable, the user's own dictionaries, and copies of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from optimizers import OPTIONS, give_gradients
from torch import Tensor, nn

from oxytorch import optim

NAMES = sorted(OPTIONS)

ITERABLES: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda m: m.parameters(),
    "named": lambda m: m.named_parameters(),
    "iterator": lambda m: iter([*m.parameters()]),
    "expression": lambda m: (p for p in m.parameters()),
    "filter": lambda m: filter(lambda p: p.requires_grad, m.parameters()),
    "values": lambda m: dict(m.named_parameters()).values(),
    "one": lambda m: m.weight,
}


def _step(optimizer: torch.optim.Optimizer, *layers: nn.Module) -> None:
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ITERABLES.values(), ids=ITERABLES)
def test_groups_hold_what_any_iterable_gives(name: str, given: Callable[..., Any]) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = getattr(optim, name)([{"params": given(first), "lr": 0.5}])
    optimizer.add_param_group({"params": given(second)})
    held = [len(group["params"]) for group in optimizer.param_groups]
    assert held == ([1, 1] if given is ITERABLES["one"] else [2, 2])
    before = [layer.weight.detach().clone() for layer in (first, second)]
    _step(optimizer, first, second)
    for layer, weight in zip((first, second), before, strict=True):
        assert not torch.equal(layer.weight, weight)


def test_sets_are_refused_as_in_torch() -> None:
    with pytest.raises(TypeError, match="ordered collections"):
        optim.SGD([{"params": set(nn.Linear(2, 2).parameters())}])


def test_the_dictionary_that_was_given_is_the_group() -> None:
    for library in (torch.optim, optim):
        layer = nn.Linear(3, 3)
        group: dict[str, Any] = {"params": layer.parameters(), "lr": 0.1}
        optimizer = library.SGD([group])
        assert optimizer.param_groups[0] is group
        group["lr"] = 0.0
        before = layer.weight.detach().clone()
        _step(optimizer, layer)
        assert torch.equal(layer.weight, before), library


COPIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "copy": lambda g: g.copy(),
    "copy.copy": copy.copy,
    "unpacked": lambda g: {**g},
    "dict": dict,
    "with a rate": lambda g: dict(g, lr=0.5),
    "or": lambda g: g | {"lr": 0.5},
    "other keys": lambda g: {k: v for k, v in g.items() if k != "foreach"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("by_group", [False, True])
def test_copies_of_groups_are_groups(name: str, copied: Callable[..., Any], by_group: bool) -> None:
    """With the formats that the group was given, or the optimizer."""
    formats: dict[str, Any] = {"master_weights": "split", "state_dtype": torch.bfloat16}
    layers = [nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = []
    for layer in layers:
        group = {"params": layer.parameters(), "lr": 0.5}
        given = {**group, **formats} if by_group else group
        optimizers.append(getattr(optim, name)([given], **({} if by_group else formats)))
    for step in range(4):
        for optimizer in optimizers:
            give_gradients(optimizer, step)
        if step == 2:
            rebuilt = copied(optimizers[0].param_groups[0])
            optimizers[0].param_groups = [rebuilt]
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].param_groups[0] is rebuilt
    pairs = zip(layers[0].parameters(), layers[1].parameters(), strict=True)
    for own, other in pairs:
        assert torch.equal(optimizers[0].master_weight(own), optimizers[1].master_weight(other))
        kept, wanted = optimizers[0].state[own], optimizers[1].state[other]
        assert all(torch.equal(value, wanted[key]) for key, value in kept.items())
    # A group goes on being what its owner holds.
    rebuilt["lr"] = 0.0
    before = [optimizers[0].master_weight(own) for own in layers[0].parameters()]
    rebuilt["weight_decay"] = 0.0
    give_gradients(optimizers[0], 9)
    optimizers[0].step()
    after = [optimizers[0].master_weight(own) for own in layers[0].parameters()]
    assert all(map(torch.equal, before, after))


def test_copied_groups_are_saved_loaded_and_copied() -> None:
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = optim.AdamW(
        [{"params": layer.parameters(), "master_weights": "split", "seed": 3}], lr=0.1
    )
    optimizer.param_groups = [{**optimizer.param_groups[0]}]
    _step(optimizer, layer)
    assert optimizer.memory_report()["low_half"] == 2
    saved = optimizer.state_dict()
    assert (
        saved["param_groups"][0].keys()
        == torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()["param_groups"][0].keys()
    )
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin = copied.param_groups[0]["params"][0]
        assert torch.equal(copied.master_weight(twin), optimizer.master_weight(layer.weight))
        assert copied._groups()[0]["seed"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer._groups()[0]["seed"] == 3


def test_options_may_be_set_in_a_copy() -> None:
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = optim.AdamW([parameter])
    optimizer.param_groups = [{**optimizer.param_groups[0], "state_dtype": torch.bfloat16}]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16
    assert "state_dtype" not in optimizer.state_dict()["param_groups"][0]


FLAGS = ("foreach", "fused", "capturable", "differentiable")


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(torch.optim, name)])
def test_arguments_of_torch_for_its_ways_are_taken(name: str, flag: str) -> None:
    """Ours has one way; `differentiable` goes torch's."""

    def made(library: Any, parameters: Iterable[Tensor]) -> Any:
        return getattr(library, name)(parameters, lr=0.1, **{flag: True})

    layers = [nn.Linear(3, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    try:
        stock = made(torch.optim, layers[0].parameters())
    except Exception as error:
        with pytest.raises(type(error)):
            made(optim, layers[1].parameters())
        return
    ours = made(optim, layers[1].parameters())
    assert ours.param_groups[0].keys() == stock.param_groups[0].keys()
    if flag == "differentiable":
        return
    assert not ours._step_supports_amp_scaling
    if flag == "capturable":
        # torch's own step takes only GPUs then.
        stock = getattr(torch.optim, name)(layers[0].parameters(), lr=0.1)
    for optimizer, layer in zip((stock, ours), layers, strict=True):
        _step(optimizer, layer)
    torch.testing.assert_close(layers[1].weight, layers[0].weight)
    loaded = copy.deepcopy(ours)
    loaded.load_state_dict(stock.state_dict())
