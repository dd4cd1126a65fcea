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
from oxytorch.program.passes import convolution_times, own_convolutions
from oxytorch.program.passes.convolution_times import Convolution, Ways
from oxytorch.rewriting import measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
PANELS, DEPTHWISE = "oxytorch::convolution_panels", "oxytorch::depthwise_convolution"
IS_FASTER = convolution_times.is_faster
SIZES = {1: (2, 32, 33), 2: (2, 32, 11, 13), 3: (2, 32, 5, 6, 7)}
_KINDS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


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
    "silu and sum": (lambda m, x: F.silu(m.c(x)) + x, ['"silu_add"'], [" add ", "aten::silu"]),
    "relu, norm and sum": (lambda m, x: x + m.n(m.c(x)).relu(), ['"relu_add"'], [" add ", "relu "]),
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
@pytest.mark.parametrize(
    ("name", "dims"),
    [(name, n) for name in BEHIND for n in (1, 2) if n == 2 or "zeros" not in name],
)
def test_what_stands_before_and_behind_is_computed_with_it(
    name: str, dims: int, groups: int, dtype: torch.dtype, seen: Seen
) -> None:
    function, wanted, gone = BEHIND[name]
    padding = 0 if "zeros" in name else 1
    text = _check(Block(dims, function, padding=padding, groups=groups), dtype, seen, SIZES[dims])
    text = text.replace("\n", " \n")
    assert all(part in text for part in [DEPTHWISE if groups > 1 else PANELS, *wanted]), text
    assert not any(part in text for part in gone), text


NEIGHBOURS: dict[str, Callable[[Any, Tensor], Any]] = {
    "zeros on one side": lambda m, x: m.c(F.pad(x, (2, 0))),
    "a norm of channels": lambda m, x: F.layer_norm(m.c(x).transpose(1, 2), (32,)).transpose(1, 2),
    "a norm of groups": lambda m, x: F.group_norm(m.c(x), 4),
    "a gate": lambda m, x: F.glu(m.c(x), 1),
    "halves": lambda m, x: torch.cat([*m.c(x).chunk(2, 1)][::-1], 1),
    "a pool": lambda m, x: F.max_pool1d(m.c(x), 2),
    "a mean": lambda m, x: m.c(x).mean(-1),
    "more positions": lambda m, x: F.interpolate(m.c(x), scale_factor=2),
    "a transposed one": lambda m, x: F.conv_transpose1d(m.c(x), m.c.weight, stride=2),
    "two dimensions": lambda m, x: m.c(x).unsqueeze(2) + m.c(x).unsqueeze(3),
    "a matrix": lambda m, x: m.c(x).transpose(1, 2) @ m.c(x),
    "a flat view": lambda m, x: m.c(x).view(x.shape[0], -1).softmax(-1),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_is_next_to_those_of_one_dimension(name: str, seen: Seen) -> None:
    model = Block(1, NEIGHBOURS[name])
    assert PANELS in _check(model, torch.float32, seen, SIZES[1])


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("groups", [1, 32])
def test_sizes_that_are_not_known(dims: int, groups: int, seen: Seen) -> None:
    model = Block(dims, lambda m, x: m.n(m.c(x)).relu(), groups=groups, stride=2, padding=1)
    run = torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=True)
    for more in (0, 3, 1, 8):
        x = torch.randn(2 + more, 32, *[size + more for size in SIZES[dims][2:]])
        _same(run(x), model(x), torch.float32)
    assert not seen.reasons and len(seen.programs) == 1
    assert (DEPTHWISE if groups > 1 else PANELS) in seen.text and '"relu"' in seen.text


@pytest.mark.parametrize("channels", [1, 3, 5, 24])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_few_and_odd_channels(channels: int, dtype: torch.dtype, seen: Seen) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 20, 5, 2, 2), nn.ReLU()).eval()
    text = _check(model, dtype, seen, (2, channels, 23, 21))
    assert PANELS in text and '"relu"' in text


class Pooled(nn.Module):
    """What pools the result of a convolution, and a function of that."""

    def __init__(self, function: Callable[[Tensor], Any], kind: Any = nn.Conv2d) -> None:
        super().__init__()
        self.c, self.function = kind(8, 32, 3, padding=1), function
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.function(self.c(x).relu())


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "largest": lambda x: F.max_pool2d(x, 3, 2, 1),
    "largest, dilated": lambda x: F.max_pool2d(x, (3, 2), dilation=2),
    "mean over the image": lambda x: x.mean((2, 3), keepdim=True),
    "mean over the image, flat": lambda x: x.mean((-1, -2)).softmax(-1),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "adaptive mean by keyword": lambda x: nn.AdaptiveAvgPool2d((1, 1))(x) * x,
    "of a sum": lambda x: F.max_pool2d(x + x.sigmoid(), 2),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pooling_behind_convolutions_is_ours(name: str, dtype: torch.dtype, seen: Seen) -> None:
    text = _check(Pooled(POOLS[name]), dtype, seen, (2, 8, 11, 13))
    assert "oxytorch::pool" in text and "_pool2d" not in text and "aten::mean" not in text, text


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
    "of uneven ends": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "mean of some positions": lambda x: x.mean(2),
    "mean of channels": lambda x: x.mean((1, 2)),
    "mean in another dtype": lambda x: x.mean((2, 3), dtype=torch.float64),
    "adaptive, of several positions": lambda x: F.adaptive_avg_pool2d(x, 2),
    "of another order": lambda x: F.max_pool2d(x.sort(1)[0], 2),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_pooling_is_torchs(name: str, seen: Seen) -> None:
    text = _check(Pooled(LEFT[name]), torch.float32, seen, (2, 8, 11, 13))
    assert PANELS in text and "oxytorch::pool" not in text, text


@pytest.mark.parametrize("function", [lambda x: F.max_pool3d(x, 2), lambda x: x.mean((2, 3, 4))])
def test_pooling_of_volumes_is_ours(function: Callable[[Tensor], Any], seen: Seen) -> None:
    text = _check(Pooled(function, nn.Conv3d), torch.float32, seen, (1, 8, 4, 5, 6))
    assert "oxytorch::pool" in text, text


class Excited(nn.Module):
    """Squeeze-and-excitation behind a convolution."""

    def __init__(self, gate: Callable[[Tensor], Tensor], linear: bool) -> None:
        super().__init__()
        self.c, self.gate = nn.Conv2d(8, 32, 3, padding=1), gate
        self.squeeze: nn.Module = nn.Linear(32, 8) if linear else nn.Conv2d(32, 8, 1)
        self.excite: nn.Module = nn.Linear(8, 32) if linear else nn.Conv2d(8, 32, 1)
        self.linear = linear
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(x).relu()
        mean = x.mean((2, 3), keepdim=not self.linear)
        factors = self.excite(self.squeeze(mean).relu())
        if self.linear:
            return self.gate(factors.view(len(x), -1, 1, 1)) * x
        return x * self.gate(factors)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_squeeze_and_excitation_is_ours(
    dtype: torch.dtype, gate: Callable[[Tensor], Tensor], linear: bool, seen: Seen
) -> None:
    text = _check(Excited(gate, linear), dtype, seen, (2, 8, 11, 13))
    assert "oxytorch::scale_channels" in text and "aten::mul" not in text, text
    if linear and gate is torch.sigmoid:  # which a view behind the layer does not keep apart
        assert text.index("sigmoid") < text.rindex("aten::reshape"), text


@pytest.mark.parametrize("dims", [(1, 2, 3), (1,)])
def test_factors_of_whole_images_and_of_pixels_are_torchs(
    dims: tuple[int, ...], seen: Seen
) -> None:
    model = Pooled(lambda x: x * x.mean(dims, keepdim=True))
    text = _check(model, torch.float32, seen, (2, 8, 11, 13))
    assert "oxytorch::scale_channels" not in text, text


class Joined(nn.Module):
    """The activation of a sum of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 3, padding=1)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)).relu()


@pytest.mark.parametrize(("behind", "counts"), [
    (lambda m, x: m.c(x).relu(), [True]),
    (lambda m, x: (m.c(x) + x).relu(), [True]),
    (lambda m, x: (x + m.c(x)).relu(), [True]),
    (lambda m, x: F.relu6(m.c(x) + x), [False]),
    (lambda m, x: m.c(x) + x, [False]),
    (lambda m, x: F.silu(m.c(x)), [False]),
    (None, [True, False]),
])  # fmt: skip
def test_activations_that_only_ours_sweep_count(
    behind: Any, counts: list[bool], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What oneDNN leaves to a step of its own is a part of its time; a sum is not."""
    found: list[bool] = []

    def is_faster(
        layer: Any, way: str, than: str, swept: bool, padded: bool, gain: float = 1
    ) -> bool:
        found.append(swept)
        return True

    monkeypatch.setattr(own_convolutions, "is_faster", is_faster)
    monkeypatch.setattr(own_convolutions, "supports", lambda dtype: None)
    model = Joined() if behind is None else Block(2, behind, padding=1)
    size = (2, 8, 7, 7) if behind is None else SIZES[2]
    _check(model, torch.float32, seen, size)
    assert found[::2] == counts and found[1::2] == counts


@pytest.mark.parametrize("before", [
    lambda x: x,
    lambda x: F.pad(x, (0, 1, 0, 1)),
    lambda x: x.to(torch.bfloat16).float(),
])  # fmt: skip
def test_the_first_convolution_is_timed_in_the_order_of_the_input(
    before: Callable[[Tensor], Tensor], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(before(x)))  # type: ignore[no-any-return]

    found: list[Any] = []

    def is_faster(layer: Any, *_: Any, **__: Any) -> bool:
        found.append((layer.takes, layer.returns))
        return False

    monkeypatch.setattr(own_convolutions, "is_faster", is_faster)
    _check(Model().eval(), torch.float32, seen, (2, 3, 9, 9))
    assert found == [(True, False), (False, False)]


@pytest.mark.parametrize(("channels", "count"), [(8, 1), (256, 8)])
def test_weights_are_timed_where_no_near_cache_holds_them(channels: int, count: int) -> None:
    ones, none = (1, 1), (0, 0)
    shape = (channels, channels, 1, 1)
    ways = Ways(Convolution((1, channels, 3, 3), shape, torch.float32, ones, none, ones, 1))
    for run in (ways.own, ways.packed):
        torch.testing.assert_close(run(), ways.plain(), rtol=2e-5, atol=2e-5)
    for weights in (ways._own_weights, ways._packed_weights):
        assert len({id(next(weights)) for _ in range(12)}) == count


def test_torchs_operators_count_as_ending_the_parallel_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    ones, none = (1, 1), (0, 0)
    layer = Convolution((1, 8, 3, 3), (8, 8, 1, 1), torch.float32, ones, none, ones, 1)
    times = {"plain": 4e-5, "packed": 4e-5, "own": 5e-5}
    monkeypatch.setattr(convolution_times, "times_of", lambda layer: times)
    for threads, wins in ((1, False), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert IS_FASTER(layer, "own", "plain") == wins
        assert not IS_FASTER(layer, "packed", "plain")


@pytest.mark.parametrize(
    ("zeros", "is_own"),
    [((0, 1, 0, 1), True), ((1, 0, 1, 0), True), ((1, 1, 1, 1), False)],
)
def test_zeros_that_only_ours_add_count(
    zeros: tuple[int, ...], is_own: bool, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """oneDNN adds as many before as behind; other zeros are a step of their own, whose result is as
    large as all that the layer takes."""
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(own_convolutions, "is_faster", IS_FASTER)
    times = {"plain": 4e-5, "packed": 4e-5, "own": 5e-5}
    monkeypatch.setattr(convolution_times, "times_of", lambda layer: times)
    monkeypatch.setattr(convolution_times, "AMID_OWN", 0.0)
    monkeypatch.setattr(convolution_times, "_seconds_of_zeros", lambda layer: 2e-5)
    layers = [nn.Conv2d(32, 32, 1), nn.ZeroPad2d(zeros), nn.Conv2d(32, 32, 3, 2, groups=32)]
    _check(nn.Sequential(*layers).eval(), torch.float32, seen, (2, 32, 8, 8))
    assert ("oxytorch::depthwise_convolution" in seen.text) == is_own


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
