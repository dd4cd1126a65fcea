"""Conversions of optimized models: those that change nothing cost nothing, the others convert."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.core.packed import PackedTensor


class Mixed(nn.Module):
    """Packed layers of several kinds, and what is not packed beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.recurrent = nn.LSTM(64, 64, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.scale = nn.Buffer(torch.full((64,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        hidden = self.convolution(hidden.mT).mT
        return self.norm(self.recurrent(hidden)[0]) * self.scale


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
WITHOUT_CHANGE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to device": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
}


@pytest.fixture
def models() -> tuple[Mixed, Any, Tensor]:
    torch.manual_seed(0)
    stock = Mixed().eval()
    x = torch.randint(20, (4, 9))
    return stock, oxytorch.optimize(stock, sample_input=x), x


def _packed(model: nn.Module) -> dict[str, PackedTensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, PackedTensor)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITHOUT_CHANGE)
def test_a_conversion_that_changes_nothing_leaves_weights_packed(
    name: str, mode: str, models: tuple[Mixed, Any, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model, x = models
    with torch.no_grad():
        expected = model(x)
    before = _packed(model)
    assert len(before) >= 4
    cells = {n: p.cell for n, p in before.items()}

    def failing(*_: Any) -> None:
        raise AssertionError("a weight is unpacked")

    with monkeypatch.context() as patch:
        patch.setattr(PackedTensor, "_taken_out", failing)
        with MODES[mode]():
            assert WITHOUT_CHANGE[name](model) is model
    after = _packed(model)
    for path, own in before.items():
        assert after[path] is own and own.cell is cells[path]
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(model(x), stock(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_conversion_that_changes_something_is_followed(
    dtype: torch.dtype, mode: str, models: tuple[Mixed, Any, Tensor]
) -> None:
    stock, model, x = models
    model(x)
    with MODES[mode]():
        stock.to(dtype), model.to(dtype)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in stock.parameters()]
    with torch.no_grad():
        found, expected = model(x), stock(x)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def test_each_parameter_is_converted_once(models: tuple[Mixed, Any, Tensor]) -> None:
    _, model, _ = models
    seen: list[int] = []

    def convert(given: Tensor) -> Tensor:
        seen.append(id(given))
        return given.to(torch.float64) if given.is_floating_point() else given

    tensors = [*model.parameters(), *model.buffers()]
    model._apply(convert)
    assert sorted(seen) == sorted(map(id, tensors))


def test_gradients_are_converted_with_their_weights(models: tuple[Mixed, Any, Tensor]) -> None:
    _, model, x = models
    model(x).square().sum().backward()
    model.double()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_what_lies_beside_packed_weights_is_converted(models: tuple[Mixed, Any, Tensor]) -> None:
    _, model, _ = models
    layer = model.layers[0]
    layer.register_buffer("note", torch.ones(3))
    layer.inner = nn.Linear(2, 2)
    weight = layer.weight
    to_double = {id(layer.note), id(layer.bias), *map(id, layer.inner.parameters())}
    layer._apply(lambda t: t.double() if id(t) in to_double else t)
    assert layer.weight is weight and type(layer) is nn.Linear
    assert layer.note.dtype == layer.bias.dtype == layer.inner.weight.dtype == torch.float64
    assert [*layer._parameters] == ["weight", "bias"]


def test_it_is_gone_after_undo_and_goes_with_copies(models: tuple[Mixed, Any, Tensor]) -> None:
    stock, model, x = models
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = [m for m in other.modules() if "_apply" in m.__dict__]
        assert own and all(m.__dict__["_apply"].module is m for m in own)
        assert other.to("cpu") is other
        torch.testing.assert_close(other(x), stock(x), rtol=1e-5, atol=1e-5)
    oxytorch.undo(model)
    assert not any("_apply" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("flag", ["overwrite_module_params", "swap_module_params"])
def test_the_ways_of_converting_that_torch_has(
    flag: str, models: tuple[Mixed, Any, Tensor]
) -> None:
    stock, model, x = models
    with torch.no_grad():
        before = model(x)
    getattr(torch.__future__, f"set_{flag}_on_conversion")(True)
    try:
        with torch.no_grad():
            torch.testing.assert_close(model.to("cpu")(x), before, rtol=0, atol=0)
        torch.testing.assert_close(model.double()(x), stock.double()(x))
    finally:
        getattr(torch.__future__, f"set_{flag}_on_conversion")(False)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.to("cpu"),
        lambda w: w.to(torch.float32),
        lambda w: w.contiguous(),
        lambda w: w.float(),
        lambda w: w.cpu(),
    ],
)
def test_inference_mode_takes_no_weight_out_for_nothing(
    use: Callable[[Tensor], Tensor], models: tuple[Mixed, Any, Tensor]
) -> None:
    _, model, x = models
    with torch.inference_mode():
        model(x)
        weight = model.layers[1].weight
        use(weight)
        assert not weight.cell.is_out


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.to(torch.float64),
        lambda w: w.reshape(-1),
        lambda w: w.flatten(),
        lambda w: w.mT,
        lambda w: w.T,
        lambda w: w.chunk(2),
        lambda w: w.to(torch.bfloat16, memory_format=torch.contiguous_format),
        lambda w: w.expand_as(torch.empty(64, 64)),
        lambda w: w.view_as(torch.empty(64, 64)),
        lambda w: w.narrow(0, 3, 5),
    ],
)
def test_composite_operators_in_inference_mode_give_the_values(
    use: Callable[[Tensor], Any], models: tuple[Mixed, Any, Tensor]
) -> None:
    stock, model, x = models
    with torch.inference_mode():
        model(x)
        found, expected = use(model.layers[1].weight), use(stock.layers[1].weight)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)
        torch.testing.assert_close(model(x), stock(x), rtol=1e-5, atol=1e-5)
