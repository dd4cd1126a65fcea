"""`optimize` with an optimizer: exact weights, plain checkpoints, the user's training loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import oxytorch
from oxytorch.optim import AdamW, pending_splits


class Network(nn.Module):
    """Convolutions, norms, an embedding tied to the output layer, and an unlisted parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8))
        self.last = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        seen = F.relu(self.norm(self.conv(images))).mean((2, 3))
        hidden = self.embedding(tokens) + seen
        scores: Tensor = self.output(self.last(hidden + self.middle(hidden)))
        return scores


def _data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (2, 16), generator=generator)
    return torch.randn(16, 3, 6, 6, generator=generator), tokens[0], tokens[1]


def _network() -> Network:
    torch.manual_seed(0)
    return Network().train()


def _step(model: nn.Module, optimizer: Any, seed: int = 0, autocast: bool = False) -> float:
    images, tokens, targets = _data(seed)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(images, tokens).float(), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def _assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert [*first] == [*second]
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("inplace", [False, True])
def test_weights_are_split_exactly(inplace: bool) -> None:
    model = _network()
    before = copy.deepcopy(model.state_dict())
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained, optimizer = oxytorch.optimize(
        model, optimizer=stock, dtype=torch.bfloat16, inplace=inplace
    )
    assert (trained is model) == inplace
    assert type(optimizer) is AdamW
    dtypes = {name: p.dtype for name, p in trained.named_parameters()}
    assert dtypes["conv.weight"] == dtypes["middle.0.bias"] == torch.bfloat16
    assert dtypes["norm.weight"] == dtypes["last.weight"] == torch.float32
    assert trained.output.weight is trained.embedding.weight
    _assert_same(trained.state_dict(), before)
    if not inplace:
        _assert_same(model.state_dict(), before)
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert "AdamW, fused step with split weights" in str(oxytorch.explain(trained))


@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_that_of_float32_weights(autocast: bool) -> None:
    model = _network()
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), dtype=torch.bfloat16
    )
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    stock = torch.optim.AdamW(masters.values(), lr=1e-2)
    losses = []
    for step in range(8):
        losses.append(_step(trained, optimizer, step % 2, autocast))
        for name, parameter in trained.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            masters[name].grad = parameter.grad.float()
        stock.step()
        state = trained.state_dict()
        for name, master in masters.items():
            torch.testing.assert_close(state[name], master, rtol=3e-7, atol=1e-8)
    assert losses[-2] < losses[0]


def test_state_is_carried_over_and_goes_back() -> None:
    model = _network()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for seed in range(3):
        _step(model, stock, seed)
    trained, optimizer = oxytorch.optimize(model, optimizer=stock, dtype=torch.bfloat16)
    wanted, found = stock.state_dict(), optimizer.state_dict()
    assert found["state"].keys() == wanted["state"].keys()
    for key, entries in wanted["state"].items():
        _assert_same(found["state"][key], entries)
    assert found["param_groups"][0]["weight_decay"] == 0.1

    _step(trained, optimizer)
    other = _network()
    other.load_state_dict(trained.state_dict())
    plain = torch.optim.AdamW(other.parameters(), lr=1.0)
    plain.load_state_dict(optimizer.state_dict())
    _assert_same(other.state_dict(), trained.state_dict())
    assert plain.param_groups[0]["lr"] == 1e-2
    _step(other, plain)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_checkpoints_keep_every_bit(order: str) -> None:
    def make() -> tuple[Any, Any]:
        model = _network()
        return oxytorch.optimize(
            model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), dtype=torch.bfloat16
        )

    first, first_optimizer = make()
    for seed in range(3):
        _step(first, first_optimizer, seed)
    saved = copy.deepcopy(first.state_dict()), copy.deepcopy(first_optimizer.state_dict())
    second, second_optimizer = make()
    _step(second, second_optimizer, 5)
    loads = [
        lambda: second.load_state_dict(saved[0]),
        lambda: second_optimizer.load_state_dict(saved[1]),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    _assert_same(second.state_dict(), saved[0])
    for seed in range(3):
        assert _step(first, first_optimizer, seed) == _step(second, second_optimizer, seed)
    _assert_same(second.state_dict(), first.state_dict())


def test_copy_and_pickle_keep_every_bit() -> None:
    model = _network()
    pair = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), dtype=torch.bfloat16
    )
    _step(*pair)
    _assert_same(copy.deepcopy(pair[0]).state_dict(), pair[0].state_dict())
    for copied in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        expected = copy.deepcopy(pair)
        assert _step(*copied, seed=1) == _step(*expected, seed=1)
        _assert_same(copied[0].state_dict(), expected[0].state_dict())
        copied[1].load_state_dict(copied[1].state_dict())
        assert _step(*copied, seed=2) == _step(*expected, seed=2)
        _assert_same(copied[0].state_dict(), expected[0].state_dict())


def test_channels_last_weights_stay_so() -> None:
    model = _network().to(memory_format=torch.channels_last)
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16
    )
    _step(trained, optimizer)
    assert trained.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert trained.state_dict()["conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_undo_brings_float32_back() -> None:
    model = _network()
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16
    )
    _step(trained, optimizer)
    state = trained.state_dict()
    oxytorch.undo(trained)
    _assert_same(trained.state_dict(), state)
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert all("forward" not in m.__dict__ for m in trained.modules())
    _step(trained, optimizer)


def test_what_exports_a_model_asks_for_a_copy_with_plain_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16
    )
    x, path = torch.randn(2, 8), tmp_path / "model.oxy"
    trained(x).float().square().sum().backward()
    optimizer.step()
    trained.eval()
    ways: list[Callable[[nn.Module], Any]] = [
        lambda m: torch.export.export(m, (x,)),
        lambda m: torch.export.export(m, (x,), strict=True),
        lambda m: oxytorch.save(m, path, sample_input=x),
        lambda m: oxytorch.graph.explain(m, x),
        torch.jit.script,
    ]
    for way in ways:
        with pytest.raises(Exception, match=r"undo\((copy.deepcopy\()?model"):
            way(trained)
    copied = oxytorch.undo(copy.deepcopy(trained))
    for way in ways:
        way(copied)
    exported = torch.export.export(copied, (x,)).module()
    assert_close(exported(x), trained(x).float(), rtol=0.02, atol=0.02)
    assert_close(oxytorch.load(path)(x), exported(x))


def test_undo_gives_gradients_back_in_float32() -> None:
    model = _network()
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16
    )
    trained.conv.weight.grad = torch.ones_like(trained.conv.weight)
    _step(trained, optimizer)
    gradients = {name: p.grad.float() for name, p in trained.named_parameters()}
    oxytorch.undo(trained)
    for name, parameter in trained.named_parameters():
        assert parameter.grad.dtype == parameter.grad_dtype == torch.float32
        assert torch.equal(parameter.grad, gradients[name])
    data = _data()[:2]
    for dtype in (None, torch.bfloat16):
        oxytorch.optimize(trained.eval(), sample_input=data, dtype=dtype)
    oxytorch.quantize(trained, [data])
    _step(trained.train(), optimizer)


def test_learning_rate_scheduler_and_hooks() -> None:
    model = _network()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called: list[str] = []
    stock.register_step_post_hook(lambda *call: called.append("post"))
    trained, optimizer = oxytorch.optimize(model, optimizer=stock, dtype=torch.bfloat16)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _step(trained, optimizer)
    scheduler.step()
    assert called == ["post"]
    assert optimizer.param_groups[0]["lr"] == 5e-3


def test_without_dtype_only_the_step_changes() -> None:
    model = _network()
    twin = copy.deepcopy(model)
    trained, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    stock = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for seed in range(3):
        assert _step(trained, optimizer, seed) == pytest.approx(_step(twin, stock, seed), rel=1e-5)
    assert type(optimizer) is AdamW
    assert {p.dtype for p in trained.parameters()} == {torch.float32}


def test_an_unknown_optimizer_is_left_and_named() -> None:
    model = _network()
    stock = torch.optim.Rprop(model.parameters())
    trained, optimizer = oxytorch.optimize(model, optimizer=stock, dtype=torch.bfloat16)
    assert type(optimizer) is torch.optim.Rprop
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert "torch.optim.rprop.Rprop is not known" in str(oxytorch.explain(trained))


class Flat(torch.optim.Optimizer):
    """An optimizer of the user's own, which keeps its parameters beside its groups too."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.own = [p for group in self.param_groups for p in group["params"]]
        self.counts = {"steps": 0}

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.counts["steps"] += 1
        with torch.no_grad():
            for parameter in self.own:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)
        return loss


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Rprop, Flat])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_optimizer_that_stays_steps_as_before(kind: Any, inplace: bool, dtype: Any) -> None:
    def losses(model: Any, optimizer: Any) -> list[float]:
        data = torch.Generator().manual_seed(0)
        x, y = torch.randn(16, 8, generator=data), torch.randn(16, 2, generator=data)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(3)]

    def pair() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        return model, kind(model.parameters(), lr=0.1)

    expected = losses(*pair())
    model, optimizer = pair()
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *args: calls.append(args))
    before = copy.deepcopy(model.state_dict())
    trained, stepped = oxytorch.optimize(model, optimizer=optimizer, inplace=inplace, dtype=dtype)
    assert losses(trained, stepped) == expected
    assert len(calls) == 3
    if not inplace:
        _assert_same(model.state_dict(), before)
        assert stepped is not optimizer and trained is not model


def test_weights_that_no_optimizer_holds_stay_float32() -> None:
    model = _network()
    model.conv.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trained, optimizer = oxytorch.optimize(
        model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        dtype={"": torch.bfloat16, "middle.3": torch.float32},
    )
    _step(trained, optimizer)
    state = trained.state_dict()
    assert torch.equal(state["conv.weight"], before["conv.weight"])
    assert trained.conv.weight.dtype == trained.conv.bias.dtype == torch.float32
    assert trained.middle[0].weight.dtype == torch.bfloat16
    assert trained.middle[3].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": 3}, "to be a torch.optim.Optimizer, got a int"),
        ({"dtype": torch.float16}, "expected dtype torch.bfloat16, torch.float32 or None"),
        ({"tune": True}, "expected no tune with an optimizer"),
        ({"sample_input": 1}, "expected no sample_input with an optimizer"),
        ({"optimizer": "foreign"}, "expected optimizer to hold parameters of model, got none"),
        ({"optimizer": "scheduled"}, "make the scheduler from the optimizer that optimize returns"),
    ],
)
def test_bad_arguments_change_nothing(options: dict[str, Any], text: str) -> None:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"optimizer": optimizer, "dtype": torch.bfloat16, "inplace": True, **options}
    if options.get("optimizer") == "foreign":
        given["optimizer"] = torch.optim.AdamW(_network().parameters())
    if options.get("optimizer") == "scheduled":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        given["optimizer"] = optimizer
    with pytest.raises((TypeError, ValueError), match=text):
        oxytorch.optimize(model, **given)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    _step(model, optimizer)


@pytest.mark.parametrize("flag", ["fused", "foreach", "capturable"])
def test_torchs_optimizers_of_every_way_are_taken(flag: str) -> None:
    model: Any = _network()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2, **{flag: True})
    model, optimizer = oxytorch.optimize(model, optimizer=stock, dtype=torch.bfloat16)
    assert type(optimizer) is AdamW
    assert optimizer.param_groups[0][flag] is True
    before = copy.deepcopy(model.state_dict())
    _step(model, optimizer)
    assert not torch.equal(model.state_dict()["output.weight"], before["output.weight"])


def _fails_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the splitting of the parameter of this number run out of memory."""
    split, calls = pending_splits.split, 0

    def failing(parameter: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            raise MemoryError("no memory left")
        split(parameter)

    monkeypatch.setattr(pending_splits, "split", failing)


def test_an_error_on_the_way_leaves_model_and_optimizer_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, stock = _network(), _network()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, stock)]
    keys = {name: {*module.__dict__} for name, module in model.named_modules()}
    _fails_at(4, monkeypatch)
    with pytest.raises(MemoryError):
        oxytorch.optimize(model, optimizer=optimizers[0], dtype=torch.bfloat16, inplace=True)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {name: {*module.__dict__} for name, module in model.named_modules()} == keys
    for seed in range(2):
        assert _step(model, optimizers[0], seed) == _step(stock, optimizers[1], seed)
    _assert_same(model.state_dict(), stock.state_dict())


def test_an_error_with_one_more_optimizer_leaves_what_the_first_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _network()
    first = torch.optim.AdamW(model.middle.parameters())
    second = torch.optim.AdamW(model.conv.parameters())
    options = {"dtype": torch.bfloat16, "inplace": True}
    model, first = oxytorch.optimize(model, optimizer=first, **options)
    told = str(oxytorch.explain(model).entries)
    _fails_at(1, monkeypatch)
    with pytest.raises(MemoryError):
        oxytorch.optimize(model, optimizer=second, **options)
    assert str(oxytorch.explain(model).entries) == told
    assert model.middle[0].weight.dtype == torch.bfloat16
    assert model.conv.weight.dtype == torch.float32
    monkeypatch.undo()
    _step(model, first)
    model, _ = oxytorch.optimize(model, optimizer=second, **options)
    assert model.conv.weight.dtype == torch.bfloat16
    oxytorch.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
