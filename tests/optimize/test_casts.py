"""With `dtype`, whatever runs in a stock model of that dtype runs, given that dtype or float32."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.graph.errors import DtypeError
from oxytorch.optimize import PASSES

SIZE = 16


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("mask", torch.ones(SIZE, SIZE).tril())
        self.register_buffer("scale", torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.mask, self.bias * self.scale)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        values = {"a": torch.randn(SIZE, 2) / 4, "b": torch.randn(2, SIZE)}
        self.parts = nn.ParameterDict(values)
        self.list = nn.ParameterList([torch.randn(SIZE)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y + y @ self.parts["a"] @ self.parts["b"] + self.list[0]


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIZE, SIZE) / 4)
        self.register_buffer("shift", torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[None] @ self.w + self.shift, (x * 2)[None].mT)[0]


class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


def _own_parametrized() -> nn.Module:
    return parametrize.register_parametrization(Raw(), "w", Doubled())


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(x), dtype=torch.int64)
        y = torch.zeros(x.shape, dtype=x.dtype).index_add_(0, rows, self.layer(x))
        return x.scatter_add(0, rows[:, None].expand(x.shape), self.layer(x)) + y


class OwnNorm(nn.Module):
    """A normalization that promotes what it is given to the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Between(nn.Module):
    """A layer that keeps its dtype, before an operator that takes one dtype only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layer = layer
        self.w = nn.Parameter(torch.randn(SIZE, SIZE) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.first(x)[None])
        return (y[0] if isinstance(y, tuple) else y)[0] @ self.w


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x, x[:1] * 0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, x, x)


class Rotary(nn.Module):
    """Frequencies in a vector, and positions that are made of integers."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.angles: Any = Angles() if elsewhere else None
        if not elsewhere:
            self.register_buffer("rates", 10.0 ** -torch.arange(SIZE // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        if self.angles is not None:
            angles = self.angles(len(x))
        else:
            angles = torch.outer(torch.arange(len(x)).to(self.rates.dtype), self.rates)
        factor = angles.cos().repeat(1, 2)
        return F.scaled_dot_product_attention(q * factor, k * factor, v)


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 10.0 ** -torch.arange(SIZE // 2))

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).to(self.rates.dtype), self.rates)


class Normalized(nn.Module):
    """Statistics in vectors of the model itself, before an operator that takes one dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.register_buffer("centre", torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.centre
        return x @ self.layer(x).mT


class Gathered(nn.Module):
    """An embedding's weight that the model itself multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, SIZE)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x + self.table(torch.arange(len(x))), self.table.weight, self.bias)


class Needs32(nn.Module):
    """Code that takes float32 alone, as stock's does not in bfloat16 either."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIZE, SIZE) / 4 + 3 * torch.eye(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(self.w, x.mT).mT


def _old_norm(make: Callable[..., Any], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(layer)


def _linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


class Remade(nn.Module):
    """A layer whose weight another module makes of a parameter of its own at each call."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name
        self.raw = nn.Parameter(getattr(layer, name).detach().clone())
        del layer._parameters[name]
        setattr(layer, name, self.raw.detach().clone())

    def forward(self, x: torch.Tensor) -> Any:
        setattr(self.layer, self.name, self.raw * 1.5)
        return self.layer(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "masked": Masked,
    "adapted": Adapted,
    "raw": Raw,
    "raw_parametrized": _own_parametrized,
    "spectral_norm": lambda: parametrizations.spectral_norm(_linear()),
    "weight_norm": lambda: parametrizations.weight_norm(_linear()),
    "orthogonal": lambda: parametrizations.orthogonal(_linear()),
    "old_spectral_norm": lambda: _old_norm(nn.utils.spectral_norm, _linear()),
    "old_weight_norm": lambda: _old_norm(nn.utils.weight_norm, _linear()),
    "scattered": Scattered,
    "own_norm": lambda: Between(OwnNorm()),
    "layer_norm": lambda: Between(nn.LayerNorm(SIZE)),
    "rms_norm": lambda: Between(nn.RMSNorm(SIZE)),
    "gru": lambda: Between(Gru()),
    "lstm": lambda: Between(nn.LSTM(SIZE, SIZE)),
    "attention": lambda: Between(Attention()),
    "encoder": lambda: Between(nn.TransformerEncoderLayer(SIZE, 2, 8)),
    "bilinear": lambda: Between(Pair()),
    "prelu": lambda: Between(nn.PReLU()),
    "rotary": lambda: Rotary(False),
    "rotary_elsewhere": lambda: Rotary(True),
    "normalized": Normalized,
    "remade_linear": lambda: Remade(_linear(), "weight"),
    "remade_alone": lambda: Remade(nn.Linear(SIZE, SIZE, bias=False), "weight"),
    "remade_lstm": lambda: Remade(nn.LSTM(SIZE, SIZE), "weight_hh_l0"),
    "remade_gru": lambda: Remade(nn.GRU(SIZE, SIZE, 2), "weight_ih_l1"),
    "remade_cell": lambda: Remade(nn.RNNCell(SIZE, SIZE), "bias_hh"),
    "gathered": Gathered,
}
NEEDS_SAMPLE = ("rotary", "normalized")
"""Models that run once the sample has shown that vectors have to be converted too."""


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(SIZE, SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sample": {"sample": True},
    "all": {"sample": True, "passes": [p for p in PASSES if p != "program"]},
    "inplace": {"sample": True, "inplace": True},
    "cast_alone": {"passes": ["cast"]},
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("name", [*MODELS])
def test_what_runs_in_stock_bfloat16_runs(name: str, form: str, nested: bool) -> None:
    options = dict(FORMS[form])
    if name in NEEDS_SAMPLE and not options.get("sample"):
        pytest.skip("needs a sample")
    torch.manual_seed(0)
    model = (nn.Sequential(MODELS[name]()) if nested else MODELS[name]()).eval()
    x = torch.randn(6, SIZE)
    with torch.no_grad():
        expected = model(x)
        stock = copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16())
    expected, stock = (y[0] if isinstance(y, tuple) else y for y in (expected, stock))
    assert stock.dtype == torch.bfloat16
    if options.pop("sample", False):
        options["sample_input"] = x
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, **options)
    allowed = 2 * float((stock.float() - expected).abs().max()) + 1e-2 * float(expected.abs().max())
    for given in (x, x.bfloat16(), x):
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                found = optimized(given)
            found = found[0] if isinstance(found, tuple) else found
            assert found.dtype == torch.bfloat16
            assert float((found.float() - expected).abs().max()) <= allowed


@pytest.mark.parametrize("inplace", [False, True])
def test_what_needs_float32_keeps_it_amid_others(inplace: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_linear(), Needs32(), Scattered()).eval()
    stock = copy.deepcopy(model)
    x = torch.randn(6, SIZE)
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x, inplace=inplace)
    assert optimized[1].w.dtype == torch.float32
    assert optimized[0].weight.dtype == torch.bfloat16
    assert "keeps its dtype: its code fails" in str(oxytorch.explain(optimized))
    with torch.no_grad():
        for given in (x, x.bfloat16()):
            found = optimized(given)
            torch.testing.assert_close(found.float(), stock(x), rtol=5e-2, atol=5e-2)
    oxytorch.undo(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), stock(x), rtol=2e-2, atol=2e-2)


class Mixing(nn.Module):
    """Code that meets a float32 constant, as stock's does in bfloat16."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.make = _linear(), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.make(self.layer(x))


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda y: y @ torch.eye(SIZE),
    "bmm": lambda y: torch.bmm(y[None], torch.eye(SIZE)[None])[0],
    "linear": lambda y: F.linear(y, torch.eye(SIZE)),
    "conv": lambda y: F.conv1d(y[None], torch.ones(2, len(y), 1)),
    "fft": lambda y: torch.fft.fft(y).real,
    "inverse": lambda y: torch.linalg.inv(y[:4, :4]),
    "index_put": lambda y: torch.zeros(y.shape).index_put((torch.tensor([0]),), y[:1]),
    "scatter": lambda y: torch.zeros(y.shape).scatter(0, torch.zeros(y.shape, dtype=int), y),
    "attention": lambda y: F.scaled_dot_product_attention(y[None], y.float()[None], y[None])[0],
    "lerp": lambda y: torch.lerp(y, torch.ones(SIZE), 0.5),
    "numpy": lambda y: torch.from_numpy(y.numpy() + 1),
    "complex": lambda y: torch.complex(y, torch.ones(y.shape)).real,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", [*MIXING])
def test_code_that_mixes_dtypes_says_what_to_do(name: str, nested: bool) -> None:
    model = (nn.Sequential(Mixing(MIXING[name])) if nested else Mixing(MIXING[name])).eval()
    x = torch.randn(6, SIZE)
    with torch.no_grad():
        with pytest.raises((RuntimeError, TypeError)) as stock:
            copy.deepcopy(model).bfloat16()(x.bfloat16())
        with pytest.raises(DtypeError, match=r"bfloat16.*sample_input") as ours:
            oxytorch.optimize(model, dtype=torch.bfloat16)(x)
        assert type(ours.value.__cause__) is type(stock.value)
        assert str(ours.value.__cause__) == str(stock.value)
        found = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x)(x)
        torch.testing.assert_close(found.float(), model(x), rtol=5e-2, atol=5e-2)


def test_a_layer_that_was_put_in_afterwards_is_named() -> None:
    x = torch.randn(6, SIZE)
    optimized = oxytorch.optimize(nn.Sequential(_linear(), _linear()).eval(), dtype=torch.bfloat16)
    optimized[1] = _linear()
    with pytest.raises(DtypeError, match=r"'1\.weight' is torch\.float32, convert") as found:
        optimized(x)
    assert "model.get_submodule('1').to(torch.bfloat16)" in str(found.value)
    optimized.get_submodule("1").to(torch.bfloat16)
    assert optimized(x).dtype is torch.bfloat16


@pytest.mark.parametrize("given", [torch.ones(6, SIZE, dtype=torch.int64), torch.randn(6, 3), None])
def test_other_errors_are_the_models_own(given: Any) -> None:
    model = nn.Sequential(Mixing(F.relu)).eval()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, TypeError)) as stock:
        copy.deepcopy(model).bfloat16()(given)
    with pytest.raises(type(stock.value)) as ours:
        optimized(given)
    assert not isinstance(ours.value, DtypeError)


def test_a_model_whose_own_code_needs_float32_stays_as_it_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(self.layer.weight) @ self.layer(x).mT

    model, x = Model().eval(), torch.randn(6, SIZE)
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x)
    assert {p.dtype for p in optimized.parameters()} == {torch.float32}
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))


@pytest.mark.parametrize("packs", [False, True])
def test_keys_that_keep_float32_amid_bfloat16(packs: bool) -> None:
    torch.manual_seed(0)
    parts = nn.ModuleDict({"a": nn.Sequential(Raw()), "b": nn.Sequential(_linear())})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.parts = nn.Linear(SIZE, SIZE), parts

        def forward(self, x: torch.Tensor) -> Any:
            y = self.first(x)
            return y, self.parts["a"](y), self.parts["b"](y)

    model, x = Model().eval(), torch.randn(6, SIZE)
    rules = {"": torch.bfloat16, "parts.a": torch.float32, "parts.b": torch.float32}
    passes = None if packs else ["cast"]
    optimized = oxytorch.optimize(model, dtype=rules, sample_input=x, passes=passes)
    with torch.no_grad():
        for given in (x, x.bfloat16()):
            dtypes = [y.dtype for y in optimized(given)]
            assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


def test_a_sample_may_have_the_dtype_that_is_asked_for() -> None:
    model, x = nn.Sequential(_linear(), nn.ReLU()).eval(), torch.randn(6, SIZE).bfloat16()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=(x,), verify=True)
    with torch.no_grad():
        assert optimized(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"weights are torch\.float32, so give floating inputs"):
        oxytorch.optimize(model, sample_input=x)


def test_nothing_is_converted_at_the_entrance_of_what_nothing_converts() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(6), nn.PReLU()).eval(), torch.randn(1, 6, SIZE)
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x)
    with torch.no_grad():
        assert optimized(x).dtype == torch.float32
        torch.testing.assert_close(optimized(x), model(x))


def test_positions_in_vectors_are_not_rounded() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _linear()

        def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.sin(step)[:, None]

    model = Steps().eval()
    given = torch.randn(2, SIZE), torch.tensor([997.0, 999.0])
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=given)
    with torch.no_grad():
        torch.testing.assert_close(optimized(*given).float(), model(*given), rtol=0, atol=3e-2)


@pytest.mark.parametrize("passes", [["cast"], None])
def test_buffers_that_are_converted_stay_one_object(passes: Any) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _linear()
            self.register_buffer("table", torch.randn(6, SIZE))
            self.list = [self.table]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.list[0]

    for inplace in (False, True):
        model, x = Tables().eval(), torch.randn(6, SIZE)
        before = model.table.clone()
        table = model.table
        found = oxytorch.optimize(model, dtype=torch.bfloat16, inplace=inplace, passes=passes)
        assert found.table is found.list[0] and found.table.dtype == torch.bfloat16
        assert (found.table is table) == inplace
        with torch.no_grad():
            assert found(x).dtype == torch.bfloat16
        oxytorch.undo(found)
        assert torch.equal(found.table, before) and found.table is found.list[0]
        if not inplace:
            assert torch.equal(model.table, before)


def test_a_write_to_a_converted_buffer_outlives_undo() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _linear()
            self.register_buffer("table", torch.randn(6, SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.table

    model = oxytorch.optimize(Tables().eval(), dtype=torch.bfloat16)
    model.table.fill_(2)
    oxytorch.undo(model)
    assert model.table.dtype == torch.float32 and bool((model.table == 2).all())


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("passes", ["default", "all"])
def test_parameters_converted_in_place_are_the_optimizers(passes: str, folds: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=1)
            self.norm = nn.BatchNorm1d(8) if folds else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.norm(self.conv(x)))

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(1, 8, 64)
    held = dict(model.named_parameters())
    model(x).sum().backward()  # an autograd graph has met them
    names = [p for p in PASSES if p != "program"] if passes == "all" else None
    oxytorch.optimize(model, sample_input=x, dtype=torch.bfloat16, inplace=True, passes=names)
    assert all(p is held[name] for name, p in model.named_parameters())
    oxytorch.undo(model)
    assert all(p is held[name] for name, p in model.named_parameters())
    with torch.no_grad():
        before = model(x)
        held["conv.bias"].add_(5)
        assert not torch.equal(model(x), before)


def test_scores_of_an_embedding_bag_may_stay_float32() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(10, SIZE, mode="sum")

        def forward(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return self.bag(ids, torch.tensor([0, 2]), scores)

    given = torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.0])
    model = Bags().eval()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(optimized(*given).float(), model(*given), rtol=2e-2, atol=2e-2)


def test_a_packed_layer_is_trained_after_its_copy_was_converted() -> None:
    model = nn.Sequential(_linear()).eval()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(optimized.parameters(), lr=0.1)
    before = optimized[0].weight.detach().clone()
    optimized(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
    assert isinstance(optimized[0].weight, (PackedTensor, nn.Parameter))
    assert not torch.equal(optimized[0].weight.detach(), before)
    assert not math.isnan(float(optimized[0].weight.sum()))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["linear", "lstm", "convolution"])
def test_a_layer_of_plain_tensors_keeps_its_dtype(kind: str, name: str, sample: bool) -> None:
    layer, x = {
        "linear": (_linear(), torch.randn(6, SIZE)),
        "lstm": (nn.LSTM(SIZE, SIZE), torch.randn(6, SIZE)),
        "convolution": (nn.Conv1d(SIZE, SIZE, 3), torch.randn(2, SIZE, 6)),
    }[kind]
    for key in [key for key in layer._parameters if key.startswith(name)]:
        value = getattr(layer, key).detach()
        delattr(layer, key)
        setattr(layer, key, value)
    model = nn.ModuleList([_linear(), layer]).eval()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.parts[0](x), self.parts[1](y)

    given = torch.randn(6, SIZE), x
    stock = Model().eval()
    sample_input = given if sample else None
    optimized = oxytorch.optimize(stock, dtype=torch.bfloat16, sample_input=sample_input)
    with torch.no_grad():
        expected, found = stock(*given)[1], optimized(*given)[1]
    expected, found = (y[0] if isinstance(y, tuple) else y for y in (expected, found))
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
