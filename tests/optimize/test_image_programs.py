"""Pass `program` on convolution networks: images of all strides and values, and of all dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn
from zoo import build, call

import oxytorch
from oxytorch.ops.linear import supports
from oxytorch.optimize import DEFAULT
from oxytorch.program.replay import Replay
from oxytorch.rewriting import measure

PASSES = (*DEFAULT, "program")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


class Residual(nn.Module):
    """Two convolutions with normalization around which the input is added."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), Residual(), nn.MaxPool2d(2), *head)
    norm = model[1].norm
    norm.running_mean.normal_(0, 0.2)
    norm.running_var.uniform_(0.5, 2)
    return model.eval()


def _image(size: int = 20) -> Tensor:
    return torch.randn(2, 3, size, size)


def _as_program(model: nn.Module, sample: Any, **options: Any) -> nn.Module:
    optimized = oxytorch.optimize(model, sample_input=sample, passes=PASSES, **options)
    assert isinstance(optimized.__dict__.get("forward"), Replay), str(oxytorch.explain(optimized))
    return optimized


def _same(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed, equal_nan=True)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_whole_networks(name: str, dtype: torch.dtype | None) -> None:
    model, _ = build(name)
    sample = (torch.randn(2, 3, 64, 64),)
    before = copy.deepcopy(model.state_dict())
    optimized = _as_program(model, sample, dtype=dtype, verify=True)
    with torch.no_grad():
        for x in (sample[0], -sample[0], sample[0].roll(1, 0)):
            found, expected = call(optimized, (x,)), call(model, (x,))
            limit = TOLERANCE[dtype or torch.float32] * float(expected.abs().max())
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=10 * limit)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    kept = optimized.state_dict()
    assert {k: v.shape for k, v in kept.items()} == {k: v.shape for k, v in before.items()}
    assert all(torch.equal(v.to(kept[k].dtype), kept[k]) for k, v in before.items())


FORMS: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: torch.randn(2, 8, 9, 7).contiguous(memory_format=torch.channels_last),
    "columns": lambda: torch.randn(2, 8, 9, 40)[..., :7],
    "every_second": lambda: torch.randn(2, 8, 18, 7)[:, :, ::2],
    "channels": lambda: torch.randn(2, 30, 9, 7)[:, 3:11],
    "part_of_channels_last": lambda: torch.randn(2, 9, 7, 16)[..., :8].permute(0, 3, 1, 2),
    "turned": lambda: torch.randn(2, 8, 7, 9).mT,
    "batch_last": lambda: torch.randn(8, 9, 7, 2).permute(3, 0, 1, 2),
    "expanded": lambda: torch.randn(1, 8, 9, 1).expand(2, 8, 9, 7),
    "offset": lambda: torch.randn(1011)[3:].view(2, 8, 9, 7),
    "over_itself": lambda: torch.randn(1000).as_strided((2, 8, 9, 7), (63, 40, 7, 1)),
}
"""Ways in which an image may lie in memory."""


@pytest.mark.parametrize("before", ["residual", "plain"])
@pytest.mark.parametrize("name", [*FORMS])
def test_images_of_any_strides(name: str, before: str) -> None:
    torch.manual_seed(0)
    body = Residual() if before == "residual" else nn.Conv2d(8, 8, 3)
    model = nn.Sequential(body, nn.Conv2d(8, 4, 1)).eval()
    optimized = _as_program(model, FORMS[name]())
    calls = counts_original(optimized)
    with torch.no_grad():
        for _ in range(3):
            x = FORMS[name]()
            found, wanted = optimized(x), model(x)
            assert found.stride() == wanted.stride()
            _same(found, wanted)
        assert not calls
        for other in FORMS.values():
            x = other()
            _same(optimized(x), model(x))


def test_sizes_beyond_the_programs_run() -> None:
    model = _network()
    optimized = _as_program(model, _image())
    with torch.no_grad():
        for size in range(16, 26):
            for _ in range(3):
                x = _image(size)
                kept = x.clone()
                _same(optimized(x), model(x))
                assert torch.equal(x, kept)


def test_results_of_two_calls_are_apart() -> None:
    optimized = _as_program(_network(), _image())
    with torch.no_grad():
        first = optimized(_image())
        kept = first.clone()
        optimized(_image())
    assert torch.equal(first, kept)


_SWALLOWING: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(),
    "max_pool": nn.MaxPool2d(2, padding=1),
    "leaky_relu": nn.LeakyReLU(0.1),
}
"""What may return a number where it is given NaN, if it is written carelessly."""


# Of infinity in bfloat16 torch itself makes NaN, where tiles multiply it by zeros.
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), dtype) for dtype in TOLERANCE]
    + [(float("inf"), torch.float32), (float("-inf"), torch.float32)],
)
@pytest.mark.parametrize("name", [*_SWALLOWING])
def test_nan_and_infinity_come_out(name: str, value: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part = _SWALLOWING[name]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), part, nn.Conv2d(8, 8, 3), part).eval().to(dtype)
    x = _image().to(dtype)
    optimized = _as_program(model, x)
    calls = counts_original(optimized)
    spoiled = x.clone()
    spoiled[0, 0, 3, 3] = value
    with torch.no_grad():
        for given in (spoiled, x, spoiled):
            _same(optimized(given), model(given), dtype)
    assert not calls


def test_a_weight_that_is_not_finite_stays_so() -> None:
    model, x = _network(), _image()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("nan")
        optimized = _as_program(model, x)
        assert torch.equal(optimized(x).isnan(), model(x).isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_are_timed_once_for_modules_and_programs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    if supports(dtype) is not None:
        pytest.skip(f"oneDNN has no products of {dtype} on this processor, so nothing is packed")
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_known", {})
    timed: list[int] = []
    own = measure._quartiles
    monkeypatch.setattr(measure, "_quartiles", lambda calls: timed.append(len(calls)) or own(calls))
    ratios: list[int] = []
    monkeypatch.setattr(measure, "_ratio", lambda *_: ratios.append(1) or 0.5)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*(copy.deepcopy(each) for each in layers * 3)).eval().to(dtype)
    x = torch.randn(1, 16, 12, 12, dtype=dtype)
    oxytorch.optimize(model, sample_input=x, graph=True)
    assert sorted(timed) in ([3], [1, 3])  # torch's, oneDNN's and ours; and the activation
    assert not ratios
    oxytorch.optimize(model, sample_input=x, graph=True)
    assert sorted(timed) in ([3], [1, 3])
