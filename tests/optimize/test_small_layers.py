"""Layers packed for some numbers of rows alone: with others, their plain values are multiplied, or
those in another order."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import oxytorch
from oxytorch.graph.recognize import convolution_of_module
from oxytorch.ops.convolution import PackedConvolutionWeight
from oxytorch.ops.linear import PackedLinearWeight, can_lie_in_panels, linear, supports
from oxytorch.optimize.passes import pack, precision
from oxytorch.optimize.passes.packed_layers import forward_kind
from oxytorch.rewriting import measure


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A layer packed for 16 rows and more, without a look at the clock."""
    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 1)
    monkeypatch.setattr(pack, "first_win", lambda key, sizes: 1)
    model = oxytorch.optimize(nn.Sequential(nn.Linear(24, 40)).eval())
    weight = model[0].weight
    assert isinstance(weight, PackedLinearWeight) and weight.least_rows == measure.USUAL_ROWS[1]
    return model


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": _saved,
}


@pytest.mark.parametrize("made", [*COPIES])
@pytest.mark.parametrize("rows", [1, 15, 16, 100])
def test_answers_follow_writes(layer: nn.Module, made: str, rows: int) -> None:
    model = COPIES[made](layer)
    x = torch.randn(rows, 24)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                plain = nn.functional.linear(x, model[0].weight.clone(), model[0].bias)
                torch.testing.assert_close(model(x), plain)
            model[0].weight.mul_(-2.0)
        assert model[0].weight.is_packed()
        assert model[0].weight.least_rows == 16 and model[0].weight.cell.keeps_plain


def test_few_rows_take_the_plain_values(layer: nn.Module) -> None:
    weight = layer[0].weight  # type: ignore[index]
    weight.cell.plain.fill_(1.0)  # behind its back, so that it shows which values are used
    for rows, is_plain in ((15, True), (16, False)):
        found = linear(torch.ones(rows, 24), weight)
        assert bool((found == 24).all()) is is_plain


def test_report_says_what_stays_in_memory(layer: nn.Module) -> None:
    details = [e.detail for e in oxytorch.explain(layer).entries if e.pass_name == "pack"]
    assert any("second copy: plain, for inputs of few rows" in detail for detail in details)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_panels", [True, False])
@pytest.mark.parametrize("made", [*COPIES])
def test_weights_lie_where_they_are_faster(
    made: str,
    in_panels: bool,
    dtype: torch.dtype,
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if supports(dtype) is not None or not can_lie_in_panels(dtype):
        pytest.skip("weights of this dtype have one order here")

    def first_win(key: tuple[object, ...], sizes: object, gain: float = 1.0) -> int | None:
        return 0 if in_panels or key[0] != "layouts" else None

    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 1)
    monkeypatch.setattr(pack, "first_win", first_win)
    x = torch.randn(3, 24, dtype=dtype)
    layer = (Conv1D(40, 24) if transposed else nn.Linear(24, 40)).eval().to(dtype)
    own = [*layer.parameters()]
    optimized = oxytorch.optimize(layer, sample_input=x, passes=["pack"])
    model = COPIES[made](optimized)
    with torch.no_grad():
        model(x)  # weights of a file are packed again
    weight: Any = model.weight
    assert weight.in_panels == in_panels and weight.packed.is_mkldnn != in_panels
    assert torch.equal(weight.clone(), layer.weight)
    with torch.no_grad():
        for factor in (1.0, -2.0):
            weight.mul_(factor)
            plain = copy.deepcopy(layer)
            plain.weight.mul_(factor)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(model(x), plain(x), rtol=tolerance, atol=tolerance)
        wide = model.to(torch.float16)
        torch.testing.assert_close(wide(x.half()), plain.half()(x.half()), rtol=1e-2, atol=1e-2)
    assert all(map(torch.equal, oxytorch.undo(optimized).parameters(), own)) or made == "itself"


def _packed_for_few(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_other_order: bool, transposed: bool
) -> nn.Module:
    """A layer in panels for up to 16 rows, without a look at the clock."""
    if supports(dtype) is not None or not can_lie_in_panels(dtype):
        pytest.skip("weights of this dtype have one order here")
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(precision, "choose", lambda context: None)
    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 1)
    monkeypatch.setattr(pack, "first_win", lambda key, sizes: 0 if has_other_order else None)
    monkeypatch.setattr(pack, "wins_of", lambda key, sizes: 2)
    layer = Conv1D(40, 24) if transposed else nn.Linear(24, 40)
    model = oxytorch.optimize(nn.Sequential(layer).eval(), dtype=dtype)
    weight: Any = model[0].weight
    assert weight.in_panels and weight.most_rows == measure.USUAL_ROWS[1] == 16
    assert weight.has_other_order is has_other_order
    return model


FOR_FEW = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "has_other_order"), FOR_FEW)
@pytest.mark.parametrize("made", [*COPIES])
def test_answers_of_layers_in_panels_for_few_rows(
    made: str,
    dtype: torch.dtype,
    has_other_order: bool,
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = COPIES[made](_packed_for_few(monkeypatch, dtype, has_other_order, transposed))
    weight: Any = model[0].weight  # type: ignore[index]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        for rows in (1, 16, 17, 100, 1):
            x = torch.randn(2, rows // 2, 24) if rows > 99 else torch.randn(rows, 24)
            for _ in range(2):
                values = weight.clone().float()
                values = values if transposed else values.t()
                plain = x.to(dtype).float() @ values + model[0].bias.float()  # type: ignore[index]
                torch.testing.assert_close(
                    model(x).float(),
                    plain,
                    rtol=tolerance,
                    atol=tolerance * float(plain.abs().max()),
                )
            model[0].weight.mul_(-1.5)  # type: ignore[index]
        model(x)
    weight = model[0].weight  # type: ignore[index]
    assert weight.is_packed() and weight.most_rows == 16
    assert weight.cell.keeps_plain is not has_other_order
    assert (weight.beside is not None) is has_other_order
    assert (weight.cell.plain is None) is has_other_order


@pytest.mark.parametrize(("dtype", "has_other_order"), FOR_FEW)
def test_many_rows_take_what_lies_beside_panels(
    dtype: torch.dtype, has_other_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _packed_for_few(monkeypatch, dtype, has_other_order, False)
    weight: Any = model[0].weight  # type: ignore[index]
    # Behind its back, so that it shows which values are used.
    if has_other_order:
        ones = torch.ones(40, 24, dtype=dtype)
        weight.cell.stored.beside = torch.ops.mkldnn._reorder_linear_weight(ones, None)
    else:
        weight.cell.plain.fill_(1.0)
    for rows, is_beside in ((1, False), (16, False), (17, True), (99, True)):
        found = linear(torch.ones(rows, 24, dtype=dtype), weight)
        assert bool((found == 24).all()) is is_beside


@pytest.mark.parametrize(("dtype", "has_other_order"), FOR_FEW)
def test_undo_and_report_of_layers_in_panels_for_few_rows(
    dtype: torch.dtype, has_other_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _packed_for_few(monkeypatch, dtype, has_other_order, False)
    details = [e.detail for e in oxytorch.explain(model).entries if e.pass_name == "pack"]
    what = "another layout" if has_other_order else "plain"
    assert any(f"second copy: {what}, for inputs of many rows" in detail for detail in details)
    weight: Any = model[0].weight  # type: ignore[index]
    assert weight.nbytes_packed() >= 2 * weight.nbytes
    assert type(oxytorch.undo(model)[0].weight) is nn.Parameter  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda has_bias: nn.Linear(32, 48, bias=has_bias), (1, 4, 32)),
        (lambda has_bias: Conv1D(48, 32), (1, 4, 32)),
        (lambda has_bias: nn.Conv1d(32, 48, 3, bias=has_bias), (1, 32, 20)),
        (lambda has_bias: nn.Conv2d(32, 48, 3, bias=has_bias), (1, 32, 20, 20)),
    ],
)
def test_layers_that_are_timed_compute_with_their_packed_weights(
    make: Callable[[bool], nn.Module], size: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    if supports(dtype) is not None:
        pytest.skip("weights of this dtype are not packed here")
    layer = make(has_bias).eval()
    values = cast(torch.Tensor, layer.weight).detach().to(dtype)
    form = convolution_of_module(layer)
    weight = (
        PackedLinearWeight(values, transposed=isinstance(layer, Conv1D))
        if form is None
        else PackedConvolutionWeight(values, form, input_size=size)
    )
    forward = forward_kind(layer)(pack.stand_in(layer, weight))

    def own(*args: object) -> None:
        raise AssertionError("the layer's own code is timed in place of the packed one")

    vars(forward)["own"] = own
    with torch.inference_mode():
        x = torch.randn(size).to(dtype)
        plain = pack.stand_in(layer, values)(x)
        torch.testing.assert_close(forward(x), plain, rtol=2e-2, atol=2e-2)
