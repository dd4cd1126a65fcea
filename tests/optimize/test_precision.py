"""Which linear layers and convolutions get the dtype asked for, and what others do among them."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.graph.recognize import convolution_of_module
from oxytorch.ops.convolution import Geometry
from oxytorch.optimize import tune
from oxytorch.optimize.passes import cast, precision
from oxytorch.program.passes.convolution_times import Convolution
from oxytorch.rewriting import measure

BF16 = torch.bfloat16


def _times(monkeypatch: pytest.MonkeyPatch, times: Callable[[nn.Module], Any]) -> None:
    """Have layers take so many seconds: as they are, so among converted ones, and converted."""
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: 0.5)
    monkeypatch.setattr(tune, "_turns", lambda runs, *_: [(1.0,) * len(runs)])
    monkeypatch.setattr(precision, "_times", lambda context, module: times(module))


class Residual(nn.Module):
    """Convolutions with all that may be fused with them, then linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.same = nn.Conv2d(16, 16, 3, padding="same", groups=4)
        self.norm_same = nn.BatchNorm2d(16)
        self.squeeze = nn.Conv2d(16, 4, 1)
        self.expand = nn.Conv2d(4, 16, 1)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)
        self.layer_norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm_same(self.same(x)) + x)
        gate = torch.sigmoid(self.expand(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = (x * gate).flatten(2).transpose(1, 2)
        return self.layer_norm(x + self.second(F.gelu(self.first(x))))


LAYERS = ("stem", "same", "squeeze", "expand", "first", "second")


def _residual() -> Residual:
    torch.manual_seed(0)
    model = Residual().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("kept", [*((name,) for name in LAYERS), LAYERS[::2], LAYERS[1::2]])
def test_layers_that_are_slower_keep_their_dtype(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...], with_sample: bool
) -> None:
    stock, x = _residual(), torch.randn(2, 3, 8, 8)
    shapes = {tuple(getattr(stock, name).weight.shape) for name in kept}

    def times(module: nn.Module) -> tuple[float, float, float]:
        return (1.0, 1.2, 4.0) if tuple(module.weight.shape) in shapes else (3.0, 3.2, 1.0)  # type: ignore[arg-type]

    _times(monkeypatch, times)
    given = {"sample_input": x} if with_sample else {}
    model = oxytorch.optimize(stock, dtype=BF16, **given)  # type: ignore[call-overload]
    expected = stock(x)
    for name in LAYERS:
        weight = getattr(model, name).weight
        assert weight.dtype == (torch.float32 if name in kept else BF16), name
    for given_x in (x, x.to(BF16)):
        with torch.no_grad():
            found = model(given_x)
        assert found.dtype == BF16
        assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    left = {e.module for e in oxytorch.explain(model).skipped if e.pass_name == "cast"}
    assert {*kept} <= left
    oxytorch.undo(model)
    assert not any(isinstance(p, PackedTensor) for p in model.parameters())


def test_nothing_is_converted_where_all_is_as_fast_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _times(monkeypatch, lambda module: (1.0, 1.1, 2.1))
    stock, x = _residual(), torch.randn(2, 3, 8, 8)
    for given in ({}, {"sample_input": x}):
        model = oxytorch.optimize(stock, dtype=BF16, **given)  # type: ignore[call-overload]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with torch.no_grad():
            torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)
            assert model(x.to(BF16)).dtype == BF16


class Buffers(nn.Module):
    """A layer between buffers of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Buffer(torch.rand(16, 8))
        self.layer = nn.Linear(8, 8)
        self.mixing = nn.Buffer(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.layer(x @ self.bank), self.mixing)


@pytest.mark.parametrize("given", [{}, {"sample_input": 1}, {"sample_input": 1, "graph": True}])
def test_buffers_keep_their_dtype_where_no_layer_is_converted(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    _times(monkeypatch, lambda module: (1.0, 1.1, 2.1))
    stock, x = Buffers().eval(), torch.rand(4, 16)
    if given:
        given = {**given, "sample_input": x}
    model = oxytorch.optimize(stock, dtype=BF16, **given)
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)
        assert model(x.to(BF16)).dtype == BF16


def test_a_sample_may_be_sparse() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, self.layer(x))

    stock = Graph().eval()
    sample = (torch.rand(4, 8), torch.eye(4).to_sparse())
    model = oxytorch.optimize(stock, sample_input=sample, dtype=BF16)
    with torch.no_grad():
        found, expected = model(*sample), stock(*sample)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)


def test_a_layer_that_a_key_names_is_converted_whatever_it_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _times(monkeypatch, lambda module: (1.0, 1.1, 50.0))
    model = oxytorch.optimize(_residual(), dtype={"": BF16, "first": BF16})
    assert model.first.weight.dtype == BF16
    assert model.second.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([], set()),
        ([(2, 3, 1)] * 3, set()),
        ([(1, 2, 2)] * 3, {0, 1, 2}),
        ([(1, 2, 1.1)], set()),  # as asked for, where that costs little
        ([(2, 4, 1), (1, 2, 5), (2, 4, 1)], {1}),
        ([(4, 6, 1), (1, 2, 3.9), (4, 6, 1)], set()),  # changes of dtype would cost more
        ([(1, 1.1, 9), (4, 5, 3)], {0}),
        ([(1, 2, 9), (1, 2, 1)], {0, 1}),  # both together are faster as they are
    ],
)
def test_what_is_much_slower_keeps_its_dtype(
    times: list[tuple[float, float, float]], kept: set[int]
) -> None:
    assert precision.slower(times, [1.15] * len(times), [2.0] * len(times)) == kept


def test_what_is_slower_as_it_is_may_be_faster_packed() -> None:
    times = [(1.0, 1.0, 3.0, 0.5), (1.0, 1.0, 0.5, 0.4)]
    assert precision.slower(times, [1.0, 1.0], [2.0, 2.0]) == set()
    assert precision.slower([each[:3] for each in times], [1.0, 1.0], [2.0, 2.0]) == {0}


def test_a_guess_of_an_inputs_size_keeps_a_dtype_less_often() -> None:
    """MobileNetV2 kept one or two layers in float32 by chance, amid conversions."""
    times = [(4, 6, 1), (1, 2, 5), (4, 6, 1)]
    assert precision.slower(times, [1.0] * 3, [2.0] * 3) == {1}
    assert precision.slower(times, [1.0] * 3, [2.0, 3.0, 2.0]) == set()


def test_a_converted_convolution_whose_bias_is_no_parameter_any_more_reads_it() -> None:
    layer, x = nn.Conv2d(8, 8, 3).bfloat16(), torch.randn(1, 8, 5, 5).bfloat16()
    bias = layer.bias.detach() * 2  # type: ignore[union-attr]
    del layer.bias
    layer.bias = bias
    expected = layer(x)
    layer.forward = cast.cast_input(layer)
    assert type(layer.forward) is cast.CastInput and torch.equal(layer(x), expected)


def test_a_layer_that_scales_channels_is_not_taken_for_the_first_one() -> None:
    first, scales = nn.Conv2d(3, 32, 3, stride=2), nn.Conv2d(4, 96, 1)
    assert precision._usual_size(first, first.weight) == (1, 3, 224, 224)
    assert precision._usual_size(scales, scales.weight) == (1, 4, 56, 56)


def test_a_layer_is_converted_for_what_is_around_it() -> None:
    times = [(2.0, 3.0, 2.1), (1.0, 2.0, 1.0)]
    assert precision.slower(times, [1.15, 1.15], [2.0, 2.0]) == set()
    assert precision.slower(times, [1.0, 1.15], [2.0, 2.0]) == set()
    assert precision.slower(times, [1.0, 1.0], [2.0, 2.0]) == {0, 1}


@pytest.mark.parametrize("converted", [1.02, 1.2])
@pytest.mark.parametrize("size", [None, (1, 8, 9)])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d])
def test_convolutions_of_a_known_size_are_converted_only_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[nn.Module],
    size: tuple[int, ...] | None,
    converted: float,
) -> None:
    """Those of an unknown one are timed with one image, and larger batches gain more."""
    _times(monkeypatch, lambda module: (1.0, 1.1, converted))
    layer = nn.Linear(9, 9) if kind is nn.Linear else nn.Conv1d(8, 8, 3)
    x = None if size is None else torch.randn(size)
    model = oxytorch.optimize(nn.Sequential(layer).eval(), dtype=BF16, sample_input=x)
    is_converted = converted < 1.05 and (kind is nn.Linear or size is None)
    assert next(model.parameters()).dtype == (BF16 if is_converted else torch.float32)


def test_programs_count_operators_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that is slow in the dtype asked for by torch's operators, and fast by ours."""
    monkeypatch.setattr(precision, "seconds_plain", lambda layer: 1.0)
    monkeypatch.setattr(precision, "_seconds_of_cast", lambda *_: 0.0)
    times = {"plain": 9.0, "packed": 8.0, "own": 0.1}
    monkeypatch.setattr(precision, "times_of", lambda layer: times)
    ones, none = (1, 1), (0, 0)
    own = Convolution((1, 8, 9, 9), (16, 8, 3, 3), torch.float32, ones, none, ones, 1)
    other = dataclasses.replace(own, dtype=BF16)
    outside = precision._convolution_times(own, other, True, False)
    within = precision._convolution_times(own, other, True, True)
    assert precision.slower([outside], [1.0], [2.0]) == {0}
    assert precision.slower([within], [1.0], [2.0]) == set()


def test_conversions_in_programs_leave_the_region_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a layer of a few microseconds is converted whatever its own time."""
    monkeypatch.setattr(precision, "seconds_plain", lambda layer: 1e-6)
    monkeypatch.setattr(precision, "_seconds_of_cast", lambda *_: 1e-6)
    monkeypatch.setattr(precision, "times_of", lambda layer: {"plain": 9e-6, "own": 9e-6})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    own = Convolution((1, 8, 1, 1), (16, 8, 1, 1), torch.float32, (1, 1), (0, 0), (1, 1), 1)
    other, large = dataclasses.replace(own, dtype=BF16), (1.0, 1.0, 0.5)
    for in_program, kept in ((False, {0}), (True, set())):
        small = precision._convolution_times(own, other, False, in_program)
        assert precision.slower([small, large], [1.0, 1.0], [2.0, 2.0]) == kept


def test_layers_are_timed() -> None:
    """The times themselves: of a slow layer they are longer, and known the second time."""
    calls = []

    def slow() -> None:
        calls.append(None)
        torch.randn(400, 400) @ torch.randn(400, 400)

    first = measure.seconds_of("slow and fast", lambda: (slow, lambda: None))
    assert first[0] > first[1] > 0
    count = len(calls)
    assert measure.seconds_of("slow and fast", lambda: (slow, lambda: None)) == first
    assert len(calls) == count


class _Own(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, groups=channels, padding="valid", dilation=2)


class _Other(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return super()._conv_forward(x, weight * 2, bias)


class _OtherCall(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class _OnTheInstance(nn.Conv2d):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._conv_forward = types.MethodType(_doubled, self)  # type: ignore[method-assign]


def _doubled(self: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
    return F.conv2d(x, weight * 2, bias)


class _OtherWeight(nn.Conv2d):
    def reset_parameters(self) -> None:
        for parameter in self._parameters.values():
            nn.init.uniform_(parameter)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(4, 4, 3, padding="same"), ((1, 1), (1, 1), (1, 1), 1)),
        (nn.Conv2d(4, 4, (5, 1), padding="same", dilation=(3, 1)), ((1, 1), (6, 0), (3, 1), 1)),
        (nn.Conv1d(4, 4, 4, padding="valid", stride=2), ((2,), (0,), (1,), 1)),
        (nn.Conv1d(4, 4, 4, padding="same"), None),
        (nn.Conv3d(4, 4, 2, padding="same", dilation=2), ((1,) * 3, (1,) * 3, (2,) * 3, 1)),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), None),
        (_Own(4), ((1, 1), (0, 0), (2, 2), 4)),
        (_Other(4, 4, 3), None),
        (_OtherCall(4, 4, 3), None),
        (_OtherWeight(4, 4, 3), None),
        (_OnTheInstance(4, 4, 3), None),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), None),
        (nn.ConvTranspose2d(4, 4, 3), None),
    ],
)
@pytest.mark.parametrize("dtype", [None, BF16])
def test_convolutions_of_any_spelling_are_packed(
    layer: nn.Module, expected: tuple[Any, ...] | None, dtype: torch.dtype | None
) -> None:
    layer = layer.eval()
    found = convolution_of_module(layer)
    assert found == (None if expected is None else Geometry(*expected))
    stock = nn.Sequential(copy.deepcopy(layer), nn.ReLU()).eval()
    x = torch.randn(2, 4, *[12] * (layer.weight.dim() - 2))  # type: ignore[operator,union-attr,arg-type]
    model = oxytorch.optimize(stock, dtype=dtype, sample_input=x)
    is_packed = any(e.pass_name == "pack" for e in oxytorch.explain(model).applied)
    assert is_packed == (expected is not None)
    tolerance = 1e-5 if dtype is None else 6e-2
    for each in (x, x[:1], F.pad(x, (3, 0))):
        with torch.no_grad():
            torch.testing.assert_close(
                model(each).float(), stock(each), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize(
    "options", [{}, {"sample_input": True}, {"sample_input": True, "graph": True}]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_in_float16(dims: int, options: dict[str, Any]) -> None:
    """For which there may be no packed weights."""
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(kind(3, 32, 3, padding=1), nn.ReLU(), kind(32, 32, 3)).eval()
    x = torch.randn(2, 3, *[12] * dims)
    given = {name: x if name == "sample_input" else value for name, value in options.items()}
    made = oxytorch.optimize(model, dtype=torch.float16, **given)
    with torch.no_grad():
        torch.testing.assert_close(made(x).float(), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_single_position_is_computed_as_by_the_convolution(
    dims: int, bias: bool, stride: int, dtype: torch.dtype
) -> None:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    layer = kind(24, 10, 1, bias=bias, stride=stride).eval().to(dtype)
    forward = cast.cast_input(layer)
    assert type(forward) is cast.CastPoint
    for sides in ((1,) * dims, (3,) * dims, (1,) * (dims - 1) + (2,)):
        for batch in (1, 4, 0):
            x = torch.randn(batch, 24, *sides)
            for given in (x, x.to(dtype)):
                with torch.no_grad():
                    found, expected = forward(given), layer(given.to(dtype))
                assert found.dtype == dtype and found.shape == expected.shape
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
                assert found.is_contiguous() == expected.is_contiguous()
    x = torch.randn(24, *[1] * dims)  # without a batch
    with torch.no_grad():
        torch.testing.assert_close(forward(x), layer(x.to(dtype)), rtol=2e-2, atol=2e-2)
    x = torch.randn(2, 24, *[1] * dims, dtype=dtype, requires_grad=True)
    forward(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    with pytest.raises(RuntimeError, match="channels"):
        forward(torch.randn(2, 23, *[1] * dims))
    padded = kind(24, 10, 1, padding=1).eval()
    assert type(cast.cast_input(padded)) is cast.CastInput


class Vision(nn.Module):
    """Code that asks for the dtype of a weight, as transformers' vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        return self.project(h) @ h.transpose(1, 2)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, xs: list[Tensor]) -> Tensor:
        return self.layer(xs[0])

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _kept(monkeypatch: pytest.MonkeyPatch, *kinds: type) -> None:
    _times(monkeypatch, lambda m: (1.0, 1.2, 9.0) if isinstance(m, kinds) else (3.0, 3.2, 1.0))


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("kinds", [(nn.Conv2d,), (nn.Linear,)])
def test_what_keeps_its_dtype_returns_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[type, ...], with_sample: bool
) -> None:
    _kept(monkeypatch, *kinds)
    stock, x = Vision().eval(), torch.randn(2, 3, 16, 16)
    given = {"sample_input": x} if with_sample else {}
    model = oxytorch.optimize(stock, dtype=BF16, **given)  # type: ignore[call-overload]
    assert {m.weight.dtype for m in (model.patch, model.project)} == {torch.float32, BF16}
    for each in (x, x.to(BF16)):
        with torch.no_grad():
            found = model(each)
        assert found.dtype == BF16
        assert (found - stock(x)).abs().max() < 0.05 * stock(x).abs().max()


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("kinds", [(), (nn.Conv2d,), (nn.Linear,), (nn.Conv2d, nn.Linear)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_a_later_conversion_is_followed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kinds: tuple[type, ...], with_sample: bool
) -> None:
    _kept(monkeypatch, *kinds)
    stock, x = Vision().eval(), torch.randn(2, 3, 16, 16)
    given = {"sample_input": x} if with_sample else {}
    model = oxytorch.optimize(stock, dtype=BF16, **given).to(dtype)  # type: ignore[call-overload]
    with torch.no_grad():
        found = model(x.to(dtype))
    assert (found - stock(x)).abs().max() < 0.05 * stock(x).abs().max()


def test_a_model_that_is_not_converted_takes_the_dtype_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _kept(monkeypatch, nn.Linear)
    x = torch.randn(3, 16)
    for given in ({}, {"sample_input": ([x.to(BF16)],)}):
        stock = Lists().eval()
        model = oxytorch.optimize(stock, dtype=BF16, **given)  # type: ignore[call-overload]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with torch.no_grad():
            for found, wanted in (
                (model([x.to(BF16)]), BF16),
                (model.encode(x.to(BF16)), torch.float32),
                (model.layer(x.to(BF16)), torch.float32),
                (model.layer(x.to(BF16)[0])[None], torch.float32),
                (model([x]), torch.float32),
            ):
                assert found.dtype == wanted
                found = found.float()
                torch.testing.assert_close(found, stock([x])[: len(found)], rtol=2e-2, atol=2e-2)
            model = model.to(torch.float64)
            assert model([x.double()]).dtype == torch.float64


def test_a_weight_that_other_code_reads_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    _times(monkeypatch, lambda m: (1.0, 1.2, 9.0) if m.out_features == 9 else (3.0, 3.2, 1.0))
    stock = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9, bias=False))
    stock[2].weight = stock[0].weight
    model = oxytorch.optimize(stock.eval(), dtype=BF16)
    assert {m.weight.dtype for m in model} == {BF16}
    with torch.no_grad():
        assert model(torch.arange(9)).dtype == BF16


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_autocast_around_optimize_changes_nothing(kind: Any) -> None:
    args, size = ((16, 8), (4, 16)) if kind is nn.Linear else ((16, 8, 3, 1, 1), (1, 16, 9, 9))
    stock, x = nn.Sequential(kind(*args)).eval(), torch.randn(size)
    with torch.autocast("cpu", BF16), torch.no_grad():
        stock(x)
        model = oxytorch.optimize(stock, sample_input=x)
        assert model(x).dtype == BF16
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x))
