"""Memory of weights: a copy's is its own, and in place none is packed that others may write to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.ops.linear import PackedLinearWeight
from oxytorch.optimize.passes import pack
from oxytorch.rewriting import measure
from oxytorch.rewriting.copies import Separation

X = torch.randn(16, 256)
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "sample": {"sample_input": X},
    "packed": {"sample_input": X, "graph": False},
    "graph": {"sample_input": X, "graph": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "tune": {"sample_input": X, "tune": True},
}


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)
    return nn.Sequential(*layers, nn.Linear(256, 1024)).eval()


def _memories(model: nn.Module) -> set[int]:
    """Of all values, packed or kept beside packed ones."""
    found: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        values: list[Any] = [tensor]
        if isinstance(tensor, PackedTensor):
            values = [tensor.cell.plain, tensor.cell.stored]
        found |= {v.untyped_storage()._cdata for v in values if type(v) in (Tensor, nn.Parameter)}
    return found


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each packed weight keep its plain values, for few rows, as a time may decide."""

    def pays(_: Any, __: Any, weight: Tensor, packed: Any, ___: Any) -> bool:
        if isinstance(packed, PackedLinearWeight):
            packed.keep_plain_below(2, weight)
        return True

    monkeypatch.setattr(pack, "_pays", pays)
    monkeypatch.setattr(measure, "TIMED", False)


@pytest.mark.parametrize("way", ["default", "packed", "bfloat16"])
def test_values_that_are_kept_beside_are_the_copys_own(beside: None, way: str) -> None:
    model = _model()
    first, second = (oxytorch.optimize(model, **WAYS[way]) for _ in range(2))
    kept = [p for p in first.parameters() if isinstance(p, PackedTensor)]
    assert kept and all(p.cell.plain is not None for p in kept)
    assert _memories(first).isdisjoint(_memories(model) | _memories(second))
    assert _memories(oxytorch.undo(first)).isdisjoint(_memories(model))


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_a_copy_is_none_to_the_original(way: str) -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    for write in (_times, _step, _load):
        optimized = oxytorch.optimize(model, **WAYS[way])
        optimized(X)
        write(optimized)
        optimized(X)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=name)


def _times(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2)


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def test_separation_looks_beside_packed_values() -> None:
    model = nn.Linear(64, 32)
    packed = PackedLinearWeight(model.weight.detach())
    packed.keep_plain_below(4, model.weight.detach())
    other = nn.Linear(64, 32)
    other.weight = packed.as_parameter(True)
    Separation(model)(other)
    assert _memories(other).isdisjoint(_memories(model))
    torch.testing.assert_close(other.weight.cell.plain, model.weight.detach())


def _flat(model: Any) -> Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return vector


def _tied(model: Any) -> Tensor:
    model[4].weight.data = model[0].weight.data
    weight: Tensor = model[0].weight
    return weight


def _turned(model: Any) -> Tensor:
    model[2].weight = nn.Parameter(model[0].weight.detach().t())
    weight: Tensor = model[2].weight
    return weight


def _held(model: Any) -> Tensor:
    held: Tensor = model.state_dict()["0.weight"]
    return held


def _stored(model: Any) -> Any:
    """No tensor: what holds a tensor's memory."""
    return model[0].weight.untyped_storage()


def test_in_place_a_storage_that_is_held_is_written_to() -> None:
    model, stock = _model(), _model()
    ours, theirs = _stored(model), _stored(stock)
    optimized = oxytorch.optimize(model, inplace=True, sample_input=X)
    for storage in (ours, theirs):
        storage.fill_(0)
    with torch.no_grad():
        torch.testing.assert_close(optimized(X), stock(X), rtol=1e-4, atol=1e-3)
    assert not isinstance(optimized[0].weight, PackedTensor)


@pytest.mark.parametrize("share", [_flat, _tied, _turned, _held])
@pytest.mark.parametrize("way", ["default", "sample"])
@pytest.mark.usefixtures("pack_small_layers")
@torch.no_grad()
def test_in_place_memory_that_others_hold_is_written_to(
    way: str, share: Callable[[Any], Tensor]
) -> None:
    model, stock = _model(), _model()
    ours, theirs = share(model), share(stock)
    optimized = oxytorch.optimize(model, inplace=True, **WAYS[way])
    writes: list[Callable[[Tensor], Any]] = [
        lambda v: v.mul_(1.5), lambda v: v.view(-1)[5:5000].add_(1), lambda v: v.copy_(v.flip(0)),
    ]  # fmt: skip
    if share is _turned:
        writes[1] = lambda v: v[5:50].add_(1)
    for write in writes:
        write(ours)
        write(theirs)
        torch.testing.assert_close(optimized(X), stock(X), rtol=1e-4, atol=1e-3)


def test_the_report_says_which_weights_others_hold() -> None:
    model = _model()
    held = model[0].weight.detach()
    text = str(oxytorch.explain(oxytorch.optimize(model, inplace=True, dtype=None)))
    assert "its memory is that of another tensor too" in text and held.shape == (1024, 256)
    assert "another tensor too" not in str(oxytorch.explain(oxytorch.optimize(_model())))
    converted = oxytorch.optimize(_model(), inplace=True, dtype=torch.bfloat16)
    assert all(isinstance(converted[place].weight, PackedTensor) for place in (0, 2, 4))
