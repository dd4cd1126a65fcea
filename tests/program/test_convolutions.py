"""Convolutions of one dimension and transposed ones in programs: packed, folded, fused."""

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
from oxytorch.ops.linear import supports
from oxytorch.program.backend import compile_graph
from oxytorch.rewriting import measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
PLAIN, TRANSPOSED = "mkldnn::_convolution_pointwise", "mkldnn::_convolution_transpose_pointwise"
SIZES = {1: (2, 8, 17), 2: (2, 8, 7, 9), 3: (2, 8, 5, 6, 7)}
_KINDS: dict[tuple[bool, int], Callable[..., nn.Module]] = {
    (False, 1): nn.Conv1d,
    (True, 1): nn.ConvTranspose1d,
    (True, 2): nn.ConvTranspose2d,
    (True, 3): nn.ConvTranspose3d,
}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.fixture(autouse=True)
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measure, "TIMED", False)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Block(nn.Module):
    """A convolution, perhaps a normalization, and a function of both and x."""

    def __init__(
        self, kind: tuple[bool, int], function: Callable[[Any, Tensor], Any], **options: Any
    ) -> None:
        super().__init__()
        self.function, settings = function, {"kernel_size": 3, **options}
        self.c = _KINDS[kind](8, settings.pop("channels", 8), **settings)
        self.n: nn.Module = _NORMS[kind[1]](self.c.out_channels)
        self.n.running_mean.copy_(torch.randn(self.c.out_channels))  # type: ignore[union-attr, operator]
        self.n.running_var.copy_(torch.rand(self.c.out_channels) + 0.5)  # type: ignore[union-attr, operator]
        self.n.weight.copy_(torch.rand(self.c.out_channels) + 0.5)  # type: ignore[union-attr, operator]
        self.n.bias.copy_(torch.randn(self.c.out_channels))  # type: ignore[union-attr, operator]
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


GEOMETRIES: dict[str, dict[str, Any]] = {
    **USUAL,
    "dilated": {"dilation": 2},
    "grouped": {"groups": 2, "channels": 6},
    "by channel": {"groups": 8},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 4, "kernel_size": 2},
}
BEHIND: dict[str, tuple[Callable[[Any, Tensor], Any], list[str], list[str]]] = {
    "norm": (lambda m, x: m.n(m.c(x)), [], ["batch_norm"]),
    "norm and silu": (lambda m, x: F.silu(m.n(m.c(x))), ['"swish"'], ["batch_norm", "silu"]),
    "gelu": (lambda m, x: F.gelu(m.c(x)), ['"gelu"'], ["aten::gelu"]),
    "relu": (lambda m, x: m.c(x).relu(), ["aten::relu_"], ["aten::relu "]),
    "tanh and a norm of rows": (
        lambda m, x: F.layer_norm(m.c(x).tanh(), [m.c(x).shape[-1]]),
        ['"tanh"'],
        [],
    ),
    "rows of positions": (
        lambda m, x: m.c(x).flatten(2).transpose(1, 2).softmax(-1),
        [],
        [],
    ),
    "in two parts": (
        lambda m, x: (lambda a, b: a.tanh() * b.sigmoid())(*m.c(x).chunk(2, 1)),
        ["aten::split"],
        [],
    ),
    "a group norm": (lambda m, x: F.group_norm(m.c(x), 2), ["native_group_norm"], []),
    "a group norm of a part": (
        lambda m, x: F.group_norm(m.c(x)[:1, :4], 2).exp(),
        ["native_group_norm"],
        [],
    ),
    "twice": (lambda m, x: m.c(m.c(x)), [], []),
    "returned and taken": (lambda m, x: (lambda y: (y, y.exp(), y[:, 1:]))(m.c(x)), [], []),
}


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=compile_graph, fullgraph=True, **options)


def same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _check(model: Block, dtype: torch.dtype, kind: tuple[bool, int], seen: Seen) -> str:
    """The program's text, after its results and their strides were compared."""
    run = compiled(model.to(dtype))
    for _ in range(2):
        x = torch.randn(SIZES[kind[1]]).to(dtype)
        found, expected = run(x), model(x)
        same(found, expected, TOLERANCE[dtype])
        pairs = zip(found, expected, strict=True) if type(found) is tuple else [(found, expected)]
        assert all(ours.stride() == theirs.stride() for ours, theirs in pairs)
    assert not seen.reasons
    return seen.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _KINDS, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_are_packed(
    name: str, kind: tuple[bool, int], dtype: torch.dtype, seen: Seen
) -> None:
    text = _check(Block(kind, alone, **GEOMETRIES[name]), dtype, kind, seen)
    if supports(dtype) is None:
        assert (TRANSPOSED if kind[0] else PLAIN) in text and "aten::convolution" not in text, text


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_padding_of_the_result(dimensions: int, seen: Seen) -> None:
    kind = (True, dimensions)
    model = Block(kind, alone, stride=2, output_padding=1, groups=2)
    assert TRANSPOSED in _check(model, torch.float32, kind, seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _KINDS, ids=str)
@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("groups", [1, 2])
def test_what_follows_is_computed_with_it(
    name: str, groups: int, kind: tuple[bool, int], dtype: torch.dtype, seen: Seen
) -> None:
    function, wanted, gone = BEHIND[name]
    text = _check(Block(kind, function, padding=1, groups=groups), dtype, kind, seen)
    if supports(dtype) is None:
        assert all(part in text for part in (TRANSPOSED if kind[0] else PLAIN, *wanted)), text
        assert not any(part in text for part in gone), text


def test_sums_and_activations_of_one_dimension_are_in_the_sweep(seen: Seen) -> None:
    kind = (False, 1)
    model = Block(kind, lambda m, x: (m.c(F.silu(m.c(x))) + x).relu(), padding=1)
    text = _check(model, torch.float32, kind, seen)
    assert f"{PLAIN}.binary" in text and '"swish"' in text and "aten::relu_" in text, text
    assert " add " not in text and text.count("aten::squeeze") == 1, text


def test_a_squeeze_of_the_model_stays(seen: Seen) -> None:
    """It takes nothing away where the size is not 1."""

    class Squeezes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.d = nn.Conv2d(8, 8, (7, 1)), nn.Conv1d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            first = self.c(x).squeeze(2).relu()
            return self.d(first).unsqueeze(2).squeeze(1).exp()  # type: ignore[no-any-return]

    model = Squeezes().eval()
    x = torch.randn(2, 8, 7, 9)
    same(compiled(model)(x), model(x))
    assert not seen.reasons


def test_writes_are_followed(seen: Seen) -> None:
    for kind in _KINDS:
        model = Block(kind, lambda m, x: F.gelu(m.n(m.c(x))))
        run, x = compiled(model), torch.randn(SIZES[kind[1]])
        same(run(x), model(x))
        for write in (model.c.weight.mul_, model.n.running_var.mul_):  # type: ignore[union-attr, operator]
            write(2)
            for _ in range(2):
                same(run(x), model(x))
    assert not seen.reasons


def test_sizes_that_are_not_known_stay_plain(seen: Seen) -> None:
    model = Block((False, 1), lambda m, x: F.gelu(m.n(m.c(x))))
    run = compiled(model, dynamic=True)
    for size in ((2, 8, 17), (3, 8, 19)):
        x = torch.randn(size)
        same(run(x), model(x))
    assert "aten::convolution" in seen.text and "batch_norm" not in seen.text


def test_a_single_signal_without_a_batch(seen: Seen) -> None:
    model, x = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU()).eval(), torch.randn(8, 17)
    found, expected = compiled(model)(x), model(x)
    same(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_convolutions_of_exported_programs_and_torchscript(kind: tuple[bool, int]) -> None:
    model, x = Block(kind, lambda m, x: F.gelu(m.n(m.c(x)))), torch.randn(SIZES[kind[1]])
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    same(program(x), model(x))
    assert (TRANSPOSED if kind[0] else PLAIN) in str(program)
    fast = oxytorch.optimize(torch.jit.trace(model, x), sample_input=x)
    same(fast(x), model(x))


def test_recorded_models_of_other_sizes() -> None:
    model = nn.Sequential(nn.Conv1d(8, 16, 3), nn.GELU(), nn.ConvTranspose1d(16, 8, 4, 2)).eval()
    x = torch.randn(1, 8, 33)
    fast = oxytorch.optimize(model, sample_input=x, graph=True, passes=("program",))
    for length in (33, 41, 41, 57, 57, 57):
        x = torch.randn(1, 8, length)
        same(fast(x), model(x))
