"""Convolutions of our own in programs: in all geometries, with what stands before and behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from geometries import USUAL, alone
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.program.backend import compile_graph
from oxytorch.rewriting import measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
PANELS, DEPTHWISE = "oxytorch::convolution_panels", "oxytorch::depthwise_convolution"
SIZES = {2: (2, 32, 11, 13), 3: (2, 32, 5, 6, 7)}
_KINDS: dict[int, Callable[..., nn.Module]] = {2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.fixture(autouse=True)
def ours_wins(monkeypatch: pytest.MonkeyPatch, packing_pays: Callable[..., None]) -> Iterator[None]:
    monkeypatch.setattr(measure, "TIMED", False)
    packing_pays(True, own=True)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Block(nn.Module):
    """A convolution, a normalization, and a function of both and x."""

    def __init__(
        self, dims: int, function: Callable[[Any, Tensor], Any], channels: int = 32, **options: Any
    ) -> None:
        super().__init__()
        self.function = function
        self.c = _KINDS[dims](32, channels, **{"kernel_size": 3, **options})
        self.n: Any = _NORMS[dims](channels)
        self.n.running_mean.copy_(torch.randn(channels))
        self.n.running_var.copy_(torch.rand(channels) + 0.5)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _same(found: Any, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.stride() == expected.stride()


def _check(model: nn.Module, dtype: torch.dtype, seen: Seen, size: tuple[int, ...]) -> str:
    run = torch.compile(model.to(dtype), backend=compile_graph, fullgraph=True)
    for _ in range(2):
        x = torch.randn(size).to(dtype)
        _same(run(x), model(x), dtype)
    assert not seen.reasons
    return seen.text


GEOMETRIES: dict[str, dict[str, Any]] = {
    **USUAL,
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2},
    "same": {"padding": "same"},
    "same, uneven": {"padding": "same", "kernel_size": 4},
    "valid": {"padding": "valid"},
    "by channel": {"groups": 32, "padding": 1},
    "by channel, strided": {"groups": 32, "stride": 2, "kernel_size": 5},
    "of one position": {"kernel_size": 1},
    "of one position, strided": {"kernel_size": 1, "stride": 2},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_are_ours(name: str, dims: int, dtype: torch.dtype, seen: Seen) -> None:
    text = _check(Block(dims, alone, **GEOMETRIES[name]), dtype, seen, SIZES[dims])
    assert (DEPTHWISE if "by channel" in name else PANELS) in text, text
    assert "aten::convolution" not in text and "mkldnn::" not in text and "aten::pad" not in text


BEHIND: dict[str, tuple[Callable[[Any, Tensor], Any], list[str], list[str]]] = {
    "norm and relu": (lambda m, x: m.n(m.c(x)).relu(), ['"relu"'], ["batch_norm", "aten::relu"]),
    "relu6": (lambda m, x: F.relu6(m.c(x)), ['"relu6"'], ["aten::relu6"]),
    "a clamp to 0 and 6": (lambda m, x: m.c(x).clamp(0, 6), ['"relu6"'], ["aten::relu6"]),
    "silu": (lambda m, x: F.silu(m.c(x)), ['"silu"'], ["aten::silu"]),
    "hardswish": (lambda m, x: F.hardswish(m.c(x)), ['"hardswish"'], ["aten::hardswish"]),
    "sum": (lambda m, x: m.n(m.c(x)) + x, ['"add"'], [" add "]),
    "sum and relu": (lambda m, x: (x + m.n(m.c(x))).relu(), ['"add_relu"'], [" add ", "relu "]),
    "sum and silu": (lambda m, x: F.silu(m.c(x) + x), ['"add"', "aten::silu"], [" add "]),
    "one-sided zeros": (
        lambda m, x: m.c(F.pad(x, (0, 1, 2, 0))),
        ["[ 2 0 0 1 ]"],
        ["aten::pad", "constant_pad"],
    ),
    "zeros of channels": (lambda m, x: m.c(F.pad(x[:, :30], (0, 0, 0, 0, 1, 1))), [], []),
    "twice": (lambda m, x: m.c(m.c(x).relu()).relu(), [], ["aten::relu"]),
    "an exponential": (lambda m, x: m.c(x).exp(), [], []),
    "a flat view": (lambda m, x: m.c(x).flatten(1).softmax(-1), [], []),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_before_and_behind_is_computed_with_it(
    name: str, groups: int, dtype: torch.dtype, seen: Seen
) -> None:
    function, wanted, gone = BEHIND[name]
    padding = 0 if "zeros" in name else 1
    text = _check(Block(2, function, padding=padding, groups=groups), dtype, seen, SIZES[2])
    text = text.replace("\n", " \n")
    assert all(part in text for part in [DEPTHWISE if groups > 1 else PANELS, *wanted]), text
    assert not any(part in text for part in gone), text


@pytest.mark.parametrize("channels", [1, 3, 5, 24])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_few_and_odd_channels(channels: int, dtype: torch.dtype, seen: Seen) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 20, 5, 2, 2), nn.ReLU()).eval()
    text = _check(model, dtype, seen, (2, channels, 23, 21))
    assert PANELS in text and '"relu"' in text


def test_writes_are_followed(seen: Seen) -> None:
    for groups in (1, 32):
        model = Block(2, lambda m, x: m.n(m.c(x)).relu(), groups=groups)
        run, x = torch.compile(model, backend=compile_graph), torch.randn(SIZES[2])
        _same(run(x), model(x), torch.float32)
        weight: Any = model.c.weight
        for write in (weight.mul_, model.n.running_var.mul_):
            write(2)
            for _ in range(2):
                _same(run(x), model(x), torch.float32)
    assert not seen.reasons


def test_recordings_have_them_too() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, padding="valid"), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 32, 3, padding="same", groups=32, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
        nn.Conv2d(32, 16, 1), nn.Flatten(),
    ).eval()  # fmt: skip
    x = torch.randn(1, 3, 20, 20)
    found = oxytorch.optimize(model, sample_input=x, passes=["program"])
    for _ in range(3):
        _same(found(x), model(x), torch.float32)
    assert "program" in str(oxytorch.explain(found))
