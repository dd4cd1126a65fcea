"""`quantize(inplace=True)`: the model itself, with the numbers that a copy has."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.graph.errors import CaptureError
from oxytorch.program import replay


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    return nn.Sequential(*layers).eval()


def _data(count: int = 8) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=draw) for _ in range(count)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_the_model_itself_with_the_numbers_of_a_copy(dtype: torch.dtype | None) -> None:
    model, data = _model(), _data()
    parameters = [*model.parameters()]
    other = oxytorch.quantize(copy.deepcopy(model), data, dtype=dtype)
    found = oxytorch.quantize(model, data, dtype=dtype, inplace=True)
    assert found is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.inference_mode():
        for x in _data(2):
            torch.testing.assert_close(found(x), other(x), rtol=2e-2, atol=2e-2)
    state, theirs = found.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], theirs[name]) for name in theirs)


def test_undo_gives_the_model_back() -> None:
    model, data, stock = _model(), _data(), _model()
    oxytorch.quantize(model, data, inplace=True)
    assert oxytorch.undo(model) is model
    with torch.inference_mode():
        torch.testing.assert_close(model(data[0]), stock(data[0]))


def test_wide_weights_are_gone_while_integers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    first = model.get_parameter("0.weight")
    place, shape, alive = first.data_ptr(), first.shape, list[int]()
    prepare = replay.Replay.prepare

    def counted(self: replay.Replay, *args: object) -> object:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        wide = [t for t in tensors if t.dtype == torch.float32 and t.shape == shape]
        alive.append(sum(t.data_ptr() == place for t in wide))
        return prepare(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(replay.Replay, "prepare", counted)
    oxytorch.quantize(model, _data(), dtype=torch.bfloat16, inplace=True)
    assert alive and not any(alive)


def test_a_dtype_that_does_not_fit_is_refused_before_calibration() -> None:
    def data() -> object:
        raise AssertionError("data were asked for")
        yield

    with pytest.raises(ValueError, match="expected dtype"):
        oxytorch.quantize(_model(), data(), dtype=torch.float64, inplace=True)  # type: ignore[arg-type]


def test_what_fails_late_leaves_the_model_working(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, stock = _model(), _data(), _model()

    def refused(self: object, *args: object) -> None:
        raise CaptureError("it was refused")

    monkeypatch.setattr(replay.Replay, "prepare", refused)
    with pytest.raises(ValueError, match="cannot be captured: it was refused"):
        oxytorch.quantize(model, data, inplace=True)
    monkeypatch.undo()
    with torch.inference_mode():
        torch.testing.assert_close(model(data[0]), stock(data[0]))
