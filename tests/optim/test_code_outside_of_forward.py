"""Code outside of a model's forward that calls its parts and uses its weights, in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import oxytorch
from oxytorch.optimize.training_modules import PartForward


class Mixing(nn.Module):
    """A part whose own code brings a float32 buffer, a parameter and a layer together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.mask = nn.Buffer(torch.tril(torch.ones(16, 16)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(self.norm(x))
        return {"hidden": hidden @ (self.weight * self.mask), "first": hidden[:, 0]}


class Model(nn.Module):
    """Has methods that training loops call by their own names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.part = Mixing()
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(16) * 1.1)
        self.shift = nn.Buffer(torch.linspace(-1, 1, 16))

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.body(self.table(x)) * self.scale + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.part(self.encode(x))["hidden"]
        return hidden @ self.table.weight.t()


def _loss_method(model: Model, x: Tensor) -> Tensor:
    hidden = model.encode(x)
    logits = hidden @ model.table.weight.t()
    return functional.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="none")


def _written(model: Model, x: Tensor) -> Tensor:
    out = torch.zeros(*x.shape, 16)
    out[:] = model.body(model.table(x))
    return out


USES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "layer": lambda m, x: m.body[0](m.table(x)),
    "container": lambda m, x: m.body(m.table(x)),
    "part": lambda m, x: m.part(m.table(x))["hidden"],
    "list": lambda m, x: m.blocks[1](m.blocks[0](m.table(x))),
    "recurrent": lambda m, x: m.recurrent(m.table(x))[0],
    "method": lambda m, x: m.encode(x),
    "loss": _loss_method,
    "tied head": lambda m, x: m.body(m.table(x)) @ m.table.weight.t(),
    "prototypes": lambda m, x: (
        functional.normalize(m.body(m.table(x)), dim=-1) @ functional.normalize(m.table.weight).T
    ),
    "rows": lambda m, x: m.body(m.table(x)) @ m.table.weight[3],
    "function": lambda m, x: functional.linear(m.body(m.table(x)), m.table.weight),
    "einsum": lambda m, x: torch.einsum("btd,vd->btv", m.body(m.table(x)), m.table.weight),
    "distance": lambda m, x: torch.cdist(m.body(m.table(x)), m.table.weight[None]),
    "mask": lambda m, x: m.body(m.table(x)).masked_fill(torch.zeros(16, dtype=torch.bool), 0.0),
    "written": _written,
    "index_add": lambda m, x: torch.zeros(4, 16).index_add(
        0, torch.arange(x.numel()) % 4, m.body(m.table(x)).flatten(0, 1)
    ),
}


def _trained(model: nn.Module, **given: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, **given)


@pytest.fixture
def pair() -> Iterator[tuple[Model, Any, Tensor]]:
    torch.manual_seed(0)
    stock = Model()
    yield stock, _trained(stock)[0], torch.randint(24, (3, 5))


@pytest.mark.parametrize("name", USES)
def test_it_is_given_float32_and_gradients_reach_the_weights(
    name: str, pair: tuple[Model, Model, Tensor]
) -> None:
    stock, model, x = pair
    use = USES[name]
    expected = use(stock, x)
    found = use(model, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())
    expected.square().mean().backward()
    found.square().mean().backward()
    for (path, own), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), path
        if other.grad is not None and other.grad.norm() > 1e-4:
            assert own.grad is not None
            error = (own.grad.float() - other.grad).norm() / other.grad.norm()
            assert error < 0.08, (path, error)


def test_the_model_itself_and_what_runs_in_it_are_bfloat16(
    pair: tuple[Model, Model, Tensor],
) -> None:
    _, model, x = pair
    seen: dict[str, torch.dtype] = {}
    for path in ("body", "body.0", "recurrent"):
        model.get_submodule(path).register_forward_hook(
            lambda _m, _i, out, path=path: seen.__setitem__(path, out.dtype)
        )
    assert model(x).dtype == torch.bfloat16
    assert seen == {"body": torch.bfloat16, "body.0": torch.bfloat16}
    model.body(model.table(x))
    assert seen == {"body": torch.float32, "body.0": torch.bfloat16}


def test_under_autocast_parts_return_what_torch_gives(pair: tuple[Model, Model, Tensor]) -> None:
    stock, model, x = pair
    with torch.autocast("cpu", torch.bfloat16):
        assert model.body(model.table(x)).dtype == stock.body(stock.table(x)).dtype
        assert model.encode(x).shape == stock.encode(x).shape


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["body", "part", "body.0"])
def test_parts_are_called_through_activation_checkpoints(
    part: str, reentrant: bool, pair: tuple[Model, Model, Tensor]
) -> None:
    _, model, _ = pair
    x = torch.randn(3, 5, 16, requires_grad=True)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        module = model.get_submodule(part)
        out = call(lambda given: module(given)["hidden"] if part == "part" else module(given), x)
        assert out.dtype == torch.float32
        inputs = [x, *model.get_submodule(part).parameters()]
        out.square().mean().backward()
        return [p.grad.float().clone() for p in inputs if p.grad is not None]

    expected = run(lambda module, given: module(given))
    x.grad = None
    found = run(lambda module, given: checkpoint(module, given, use_reentrant=reentrant))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_in_a_compiled_program_parts_are_as_weights_are(
    pair: tuple[Model, Model, Tensor],
) -> None:
    _, model, x = pair
    compiled = torch.compile(
        lambda: model.body(model.table(x)) @ model.table.weight.t(), backend="aot_eager"
    )
    assert compiled().dtype == torch.bfloat16


def test_parts_that_stay_outside_of_the_optimizer_return_float32_too() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.part.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    x = torch.randint(24, (2, 4))
    assert model.encode(x).dtype == torch.float32
    assert (model.body(model.table(x)) @ model.table.weight.t()).dtype == torch.float32


@pytest.mark.parametrize("path", ["body", "body.0", "part", "blocks.0", "table", ""])
def test_forwards_that_somebody_set_are_called(path: str) -> None:
    torch.manual_seed(0)
    model = Model()
    module, calls = model.get_submodule(path), []
    own = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(path)
        return own(*args, **kwargs)

    module.forward = counted  # type: ignore[method-assign]
    x = torch.randint(24, (2, 4))
    expected = model(x)
    fast, optimizer = _trained(model, inplace=True)
    calls.clear()
    found = fast(x)
    assert calls == [path]
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    found.float().sum().backward()
    optimizer.step()
    oxytorch.undo(fast)
    assert module.forward is counted


def test_a_low_rank_update_that_is_set_as_a_forward_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    layer: Any = model[0]
    layer.up, layer.down = (nn.Parameter(torch.randn(s) / 3) for s in ((8, 2), (2, 8)))
    layer.forward = lambda x: functional.linear(x, layer.weight + layer.up @ layer.down, layer.bias)
    x = torch.randn(5, 8)
    expected = model(x)
    fast, _ = _trained(model, inplace=True)
    found = fast(x)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05)
    found.float().square().sum().backward()
    assert layer.up.grad is not None and layer.weight.grad is not None


def test_copies_and_what_undo_gives_back_have_no_forward_of_ours(
    pair: tuple[Model, Model, Tensor],
) -> None:
    _, model, x = pair
    assert isinstance(model.body.__dict__["forward"], PartForward)
    for plain in (copy.deepcopy(model), model):
        oxytorch.undo(plain)
        found = [m for m in plain.modules() if "forward" in m.__dict__]
        assert not found and plain.body(plain.table(x)).dtype == torch.float32


def test_two_dtypes_in_a_part_are_explained() -> None:
    class Scattering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(4, 4).index_add_(0, torch.arange(4), self.layer(x))

    model = nn.ModuleDict({"part": Scattering()})
    model, _ = _trained(model)
    with pytest.raises(oxytorch.DtypeError, match="mixes dtypes"):
        model["part"](torch.randn(4, 4))
