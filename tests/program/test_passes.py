"""Passes on programs: what they join is what they are meant to join, and nothing changes by it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from oxytorch.ops.attention import is_fast
from oxytorch.ops.linear import supports
from oxytorch.program.backend import compile_graph
from oxytorch.program.derived import MOST_IN_A_ROW
from oxytorch.program.passes import linear
from oxytorch.program.passes.editor import Editor
from oxytorch.program.passes.simplify import simplify
from oxytorch.program.program import Step, Steps, Value
from threads import errors_in_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("everything_is_packed"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LINEAR, CONVOLUTION = "mkldnn::_linear_pointwise", "mkldnn::_convolution_pointwise"


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=compile_graph, fullgraph=True, **options)


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Run(nn.Module):
    """A function of layers and an input as a module."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class RMSNorm(nn.Module):
    """As the models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _lively(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.num_features))  # type: ignore[union-attr]
            module.running_var.copy_(torch.rand(module.num_features) + 0.5)  # type: ignore[union-attr]
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)) and module.weight is not None:
            module.weight.copy_(torch.rand_like(module.weight) + 0.5)
            module.bias.copy_(torch.randn_like(module.bias))
    return model.eval()


def _layer() -> nn.Module:
    return nn.Linear(16, 16)


JOINED: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "linear": (lambda: Run(lambda m, x: m.a(x), a=_layer()), [LINEAR], ["aten::linear"]),
    "without bias": (
        lambda: Run(lambda m, x: m.a(x), a=nn.Linear(16, 8, bias=False)),
        [LINEAR],
        ["aten::mm", "aten::t"],
    ),
    "gelu": (
        lambda: Run(lambda m, x: F.gelu(m.a(x)), a=_layer()),
        ['"gelu" [ ] some "none"'],
        ["aten::gelu"],
    ),
    "tanh gelu": (
        lambda: Run(lambda m, x: F.gelu(m.a(x), approximate="tanh"), a=_layer()),
        ['"gelu" [ ] some "tanh"'],
        ["aten::gelu"],
    ),
    "silu": (lambda: Run(lambda m, x: F.silu(m.a(x)), a=_layer()), ['"swish"'], ["aten::silu"]),
    "relu is apart": (
        lambda: Run(lambda m, x: m.a(x).relu(), a=_layer()),
        [LINEAR, "aten::relu_"],
        ["aten::relu "],
    ),
    "GELU, written out": (
        lambda: Run(
            lambda m, x: (lambda y: y * 0.5 * (1 + (y / 2**0.5).erf()))(m.a(x)), a=_layer()
        ),
        ['"gelu" [ ] some "none"'],
        ["aten::erf"],
    ),
    "GELU, halved at the end": (
        lambda: Run(
            lambda m, x: (lambda y: (y * (1 + (y * 0.5**0.5).erf())) * 0.5)(m.a(x)), a=_layer()
        ),
        ['"gelu" [ ] some "none"'],
        ["aten::erf"],
    ),
    "GELU by tanh, written out": (
        lambda: Run(
            lambda m, x: (
                lambda y: 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y.pow(3))))
            )(m.a(x)),
            a=_layer(),
        ),
        ['"gelu" [ ] some "tanh"'],
        ["aten::tanh"],
    ),
    "with another constant": (
        lambda: Run(
            lambda m, x: (lambda y: 0.5 * y * (1 + torch.tanh(0.797 * (y + 0.044715 * y.pow(3)))))(
                m.a(x)
            ),
            a=_layer(),
        ),
        ["aten::tanh"],
        ["gelu"],
    ),
    "of another tensor": (
        lambda: Run(
            lambda m, x: m.a(x) * 0.5 * (1 + (m.b(x) / 2**0.5).erf()), a=_layer(), b=_layer()
        ),
        ["aten::erf"],
        ["gelu"],
    ),
    "SiLU, written out": (
        lambda: Run(lambda m, x: (lambda y: y * y.sigmoid())(m.a(x)), a=_layer()),
        ['"swish"'],
        ["aten::sigmoid"],
    ),
    "a sigmoid of another tensor": (
        lambda: Run(lambda m, x: m.a(x) * m.b(x).sigmoid(), a=_layer(), b=_layer()),
        ['"sigmoid"'],
        ["swish"],
    ),
    "sum": (lambda: Run(lambda m, x: m.a(x) + x, a=_layer()), [f"{LINEAR}.binary"], [" add "]),
    "sum of two layers": (
        lambda: Run(lambda m, x: m.a(x) + m.b(x), a=_layer(), b=_layer()),
        [f"{LINEAR}.binary"],
        [" add "],
    ),
    "a sum that is broadcast": (
        lambda: Run(lambda m, x: m.a(x) + x[:, :1], a=_layer()),
        [LINEAR, " add "],
        [".binary"],
    ),
    "a result that is taken twice": (
        lambda: Run(lambda m, x: (lambda y: F.gelu(y) * y)(m.a(x)), a=_layer()),
        ["oxytorch::gelu_mul"],
        [],
    ),
    "norm": (
        lambda: Run(lambda m, x: m.n(x), n=nn.LayerNorm(16)),
        ["oxytorch::layer_norm"],
        ["aten::native_layer_norm"],
    ),
    "sum and norm": (
        lambda: Run(lambda m, x: m.n(x + m.a(x)), n=nn.LayerNorm(16), a=_layer()),
        ["oxytorch::add_layer_norm", "false"],
        [" add ", ".binary"],
    ),
    "sum and norm, the sum is taken": (
        lambda: Run(
            lambda m, x: (lambda y: y + m.n(y))(x + m.a(x)), n=nn.LayerNorm(16), a=_layer()
        ),
        ["oxytorch::add_layer_norm", "true"],
        [],
    ),
    "norm of two dimensions": (
        lambda: Run(lambda m, x: m.n(x), n=nn.LayerNorm((5, 16))),
        ["aten::native_layer_norm"],
        ["oxytorch::"],
    ),
    "RMS norm": (
        lambda: Run(lambda m, x: m.n(x), n=RMSNorm()),
        ["oxytorch::rms_norm"],
        ["aten::rsqrt", "aten::mean.dim"],
    ),
    "sum and RMS norm": (
        lambda: Run(lambda m, x: m.n(x + m.a(x)), n=RMSNorm(), a=_layer()),
        ["oxytorch::add_rms_norm"],
        ["aten::rsqrt", " add "],
    ),
    "a mean over other rows": (
        lambda: Run(lambda m, x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6)),
        ["aten::rsqrt"],
        ["oxytorch::"],
    ),
    "softmax of scores": (
        lambda: Run(lambda m, x: torch.softmax(m.a(x) / 4.0 + x[:, :1], -1), a=_layer()),
        ["oxytorch::softmax"],
        ["aten::_softmax", "aten::div", " add "],
    ),
    "softmax of scaled scores": (
        lambda: Run(lambda m, x: torch.softmax(0.25 * m.a(x), 2), a=_layer()),
        ["oxytorch::softmax"],
        ["aten::_softmax", "aten::mul"],
    ),
    "softmax of a sum that is returned": (
        lambda: Run(lambda m, x: (s := m.a(x) * 0.5 + x[:1]) + torch.softmax(s, -1), a=_layer()),
        ["aten::_softmax"],
        ["oxytorch::softmax"],
    ),
    "softmax over other rows": (
        lambda: Run(lambda m, x: torch.softmax(m.a(x) / 4.0, 1), a=_layer()),
        ["aten::_softmax"],
        ["oxytorch::softmax"],
    ),
    "gate": (
        lambda: Run(lambda m, x: F.silu(m.a(x)) * m.b(x), a=_layer(), b=_layer()),
        ["oxytorch::silu_mul"],
        ["aten::silu", '"swish"'],
    ),
}


def _assert_steps(seen: Seen, dtype: torch.dtype, wanted: Any, gone: Any) -> None:
    """Of layers that oneDNN has in this dtype here."""
    if supports(dtype) is None:
        assert all(part in seen.text for part in wanted), seen.text
        assert not any(part in seen.text for part in gone), seen.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", JOINED)
def test_layers_are_joined(name: str, dtype: torch.dtype, seen: Seen) -> None:
    make, wanted, gone = JOINED[name]
    model = _lively(make()).to(dtype)
    run = compiled(model)
    for _ in range(2):
        x = torch.randn(3, 5, 16, dtype=dtype)
        same(run(x), model(x), TOLERANCE[dtype])
    assert not seen.reasons
    _assert_steps(seen, dtype, wanted, gone)


@pytest.mark.parametrize("name", JOINED)
def test_strides_are_those_of_torch(name: str, seen: Seen) -> None:
    model = _lively(JOINED[name][0]())
    run = compiled(model)
    for x in (torch.randn(5, 3, 16).transpose(0, 1), torch.randn(3, 16, 5).transpose(1, 2)):
        found, expected = run(x), model(x)
        same(found, expected)
        assert found.stride() == expected.stride()
    assert not seen.reasons


def _convolution(**options: Any) -> nn.Module:
    return nn.Conv2d(8, 8, 3, padding=1, **options)


IMAGES: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "convolution": (lambda: Run(lambda m, x: m.c(x), c=_convolution()), [CONVOLUTION], []),
    "grouped and strided": (
        lambda: Run(lambda m, x: m.c(x), c=nn.Conv2d(8, 16, 3, stride=2, groups=4, dilation=2)),
        [CONVOLUTION],
        [],
    ),
    "norm": (
        lambda: Run(lambda m, x: m.n(m.c(x)), c=_convolution(), n=nn.BatchNorm2d(8)),
        [CONVOLUTION],
        ["batch_norm"],
    ),
    "norm without bias": (
        lambda: Run(lambda m, x: m.n(m.c(x)), c=_convolution(bias=False), n=nn.BatchNorm2d(8)),
        [CONVOLUTION],
        ["batch_norm"],
    ),
    "norm without weights": (
        lambda: Run(lambda m, x: m.n(m.c(x)), c=_convolution(), n=nn.BatchNorm2d(8, affine=False)),
        [CONVOLUTION],
        ["batch_norm"],
    ),
    "norm of a result that is taken": (
        lambda: Run(
            lambda m, x: (lambda y: y + m.n(y))(m.c(x)), c=_convolution(), n=nn.BatchNorm2d(8)
        ),
        [CONVOLUTION, "batch_norm"],
        [],
    ),
    "residual block": (
        lambda: Run(lambda m, x: (m.n(m.c(x)) + x).relu(), c=_convolution(), n=nn.BatchNorm2d(8)),
        [f"{CONVOLUTION}.binary", "aten::relu_"],
        ["batch_norm", " add ", "aten::relu "],
    ),
    "silu": (lambda: Run(lambda m, x: F.silu(m.c(x)), c=_convolution()), ['"swish"'], []),
    "zeros around": (
        lambda: Run(lambda m, x: m.c(F.pad(x, (2, 2, 1, 1))), c=_convolution()),
        [f"{CONVOLUTION} %0", "[ 2 3 ]"],
        ["aten::pad"],
    ),
    "other zeros on each side": (
        lambda: Run(lambda m, x: m.c(F.pad(x, (0, 1, 0, 1))), c=_convolution()),
        [CONVOLUTION, "aten::pad"],
        [],
    ),
    "transposed": (
        lambda: Run(lambda m, x: m.n(m.c(x)), c=nn.ConvTranspose2d(8, 8, 3), n=nn.BatchNorm2d(8)),
        ["mkldnn::_convolution_transpose_pointwise"],
        ["batch_norm", "aten::convolution"],
    ),
    "flattened": (
        lambda: Run(lambda m, x: m.a(m.c(x).flatten(1)), c=_convolution(), a=nn.Linear(8 * 63, 4)),
        [CONVOLUTION, LINEAR, "aten::reshape"],
        ["aten::view"],
    ),
    "rows of positions": (
        lambda: Run(
            lambda m, x: m.n(m.c(x).flatten(2).transpose(1, 2)), c=_convolution(), n=nn.LayerNorm(8)
        ),
        [CONVOLUTION, "oxytorch::layer_norm"],
        [],
    ),
    "permuted": (
        lambda: Run(lambda m, x: m.c(x).permute(0, 2, 3, 1), c=_convolution()),
        [CONVOLUTION],
        [],
    ),
    "activated after it was permuted": (
        lambda: Run(lambda m, x: m.c(x).permute(0, 2, 1, 3).exp(), c=_convolution()),
        ["aten::convolution"],
        [],
    ),
    "several outputs": (
        lambda: Run(
            lambda m, x: (lambda y: (y, y.relu(), y[:, 1:], m.c(y)))(m.c(x)), c=_convolution()
        ),
        [CONVOLUTION],
        [],
    ),
}


IN_PANELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, x: y,
    "gelu": lambda y, x: F.gelu(y),
    "gelu_tanh": lambda y, x: F.gelu(y, approximate="tanh"),
    "silu": lambda y, x: F.silu(y),
    "relu": lambda y, x: F.relu(y),
    "tanh": lambda y, x: y.tanh(),
    "sigmoid": lambda y, x: y.sigmoid(),
    "hardswish": lambda y, x: F.hardswish(y),
    "add": lambda y, x: y + x,
}
"""What follows a layer, by the epilogue that computes it."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IN_PANELS)
def test_layers_in_panels_are_joined(
    name: str,
    dtype: torch.dtype,
    bias: bool,
    seen: Seen,
    packing_pays: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing_pays(True, in_panels=True)
    monkeypatch.setattr(linear, "SMALLEST", 0)
    after = IN_PANELS[name]
    layer = nn.Linear(16, 16, bias=bias)
    model = Run(lambda m, x: after(m.a(x), x), a=layer).to(dtype)
    run = compiled(model, dynamic=False)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 3, 16, dtype=dtype)
        same(run(x), model(x), TOLERANCE[dtype])
        x[0, 0, 0] = torch.nan
        same(run(x).isnan(), model(x).isnan())
    assert len(seen.programs) == 3
    for call in seen.programs:
        assert f'"{name}"' in str(call.program)
        assert LINEAR not in str(call.program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_are_joined(
    name: str, order: torch.memory_format, dtype: torch.dtype, seen: Seen
) -> None:
    make, wanted, gone = IMAGES[name]
    model = _lively(make()).to(dtype)
    run = compiled(model)
    for _ in range(2):
        x = torch.randn(2, 8, 7, 9, dtype=dtype).to(memory_format=order)
        found, expected = run(x), model(x)
        same(found, expected, 2 * TOLERANCE[dtype])
        pairs = zip(found, expected, strict=True) if type(found) is tuple else [(found, expected)]
        for ours, theirs in pairs:
            assert ours.stride() == theirs.stride()
    assert not seen.reasons
    _assert_steps(seen, dtype, wanted, gone)


class Network(nn.Module):
    """Layers of all kinds that are derived from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.wide, self.out = nn.Linear(8 * 36, 128), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x)).relu()
        return self.out(F.gelu(self.wide(y.flatten(1))))


def _set_data(model: Network) -> None:
    model.out.weight.data = torch.randn(4, 128)


def _new_parameter(model: Network) -> None:
    model.wide.weight = nn.Parameter(torch.randn(128, 288))


WRITES: dict[str, Callable[[Network], Any]] = {
    "in place": lambda m: m.wide.weight.mul_(2),
    "a bias": lambda m: m.out.bias.add_(1),
    "a buffer": lambda m: m.norm.running_var.mul_(3),  # type: ignore[union-attr, operator]
    "a small tensor behind its version": lambda m: m.norm.weight.data.mul_(2),
    "other memory": _set_data,
    "another parameter": _new_parameter,
    "a state": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "a view": lambda m: m.wide.weight[3].zero_(),
    "an optimizer": lambda m: torch._foreach_mul_([*m.parameters()], 1.5),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_followed(name: str, seen: Seen) -> None:
    model = _lively(Network())
    run = compiled(model)
    x = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        same(run(x), model(x))
    for _ in range(2):
        WRITES[name](model)  # type: ignore[arg-type]
        for _ in range(2):
            same(run(x), model(x))
    assert not seen.reasons


def test_values_are_made_once_and_not_at_every_step_of_a_training(seen: Seen) -> None:
    model = _lively(Network())
    run = compiled(model)
    x = torch.randn(2, 3, 8, 8)
    run(x)
    (call,) = seen.programs
    own, count = call._placed._derived.program, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return own(*args)

    call._placed._derived.program = counted
    run(x), run(x)
    assert count == 0
    for _ in range(9):
        model.wide.weight.mul_(1.1)
        same(run(x), model(x))
    assert count <= MOST_IN_A_ROW
    run(x)
    made = count
    assert made > 0 and call._placed._derived(_arguments(call, model, x)) is not None
    run(x), run(x)
    assert count == made


def _arguments(call: Any, model: Network, x: Tensor) -> list[Any]:
    noted = iter(call._placed._derived._noted[0])
    places = {*call._placed._derived.places}
    return [next(noted) if i in places else x for i in range(max(places) + 1)]


def test_weights_made_in_inference_mode(seen: Seen) -> None:
    """They do not count the writes to them."""
    with torch.inference_mode():
        model = _lively(Network())
        run = compiled(model)
        x = torch.randn(2, 3, 8, 8)
        same(run(x), model(x))
        model.wide.weight.mul_(2)
        same(run(x), model(x))
    assert not seen.reasons


def test_what_is_made_of_weights_and_returned_may_be_written(seen: Seen) -> None:
    model = Run(lambda m, x: (m.a(x), m.a.weight * 2, m.a.weight.t()), a=_layer()).eval()
    run = compiled(model)
    x = torch.randn(3, 16)
    for _ in range(3):
        found = run(x)
        same(found, model(x))
        found[1].zero_()
    assert not seen.reasons


def test_sizes_that_are_not_known(seen: Seen) -> None:
    model = _lively(nn.Sequential(_layer(), nn.GELU(), _layer(), nn.LayerNorm(16)))
    run = compiled(model, dynamic=True)
    for shape in ((2, 5, 16), (3, 4, 16), (7, 9, 16)):
        x = torch.randn(shape)
        same(run(x), model(x))
    text = seen.text
    assert "oxytorch::layer_norm" in text and '"gelu"' in text and "aten::gelu" not in text


class Attention(nn.Module):
    """Self-attention with the mask of padding that models of transformers make."""

    def __init__(self, masked: bool, is_causal: bool) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.masked, self.is_causal = masked, is_causal

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        query, key, value = self.parts(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = None
        if self.masked:
            mask = torch.where(seen[:, None, None], 0.0, float("-inf")).to(x.dtype)
            mask = mask.expand(-1, 1, x.shape[1], -1)
        found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.is_causal)
        return self.out(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.skipif(not is_fast(), reason="torch's own attention is as fast at this level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("masked", "is_causal"), [(False, False), (True, False), (False, True)])
def test_attention(masked: bool, is_causal: bool, dtype: torch.dtype, seen: Seen) -> None:
    model = Attention(masked, is_causal).eval().to(dtype)
    run = compiled(model)
    x, shown = torch.randn(2, 5, 16, dtype=dtype), torch.ones(2, 5, dtype=torch.bool)
    shown[1, 3:] = False
    shown[0, 0] = False
    same(run(x, shown), model(x, shown), TOLERANCE[dtype])
    assert not seen.reasons and "oxytorch::attention" in seen.text
    shown[:] = False  # rows that see nothing
    same(run(x, shown), model(x, shown), TOLERANCE[dtype])


@pytest.mark.skipif(not is_fast(), reason="torch's own attention is as fast at this level")
@pytest.mark.parametrize(("masked", "is_causal"), [(False, False), (True, False), (False, True)])
def test_attention_of_any_length(masked: bool, is_causal: bool, seen: Seen) -> None:
    model = Attention(masked, is_causal).eval()
    run = compiled(model, dynamic=True)
    for batch, length in ((2, 5), (3, 9), (2, 70), (5, 33)):
        x, shown = torch.randn(batch, length, 16), torch.ones(batch, length, dtype=torch.bool)
        shown[1, 3:] = False
        same(run(x, shown), model(x, shown))
    assert not seen.reasons and "oxytorch::attention" in seen.text


def test_attention_of_any_length_is_timed_at_all_usual_ones(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []

    def first_win(key: Any, calls: Any) -> int | None:
        for plain, ours in calls:
            same(plain(), ours())
            timed.append(tuple(plain().shape))
        return 1  # not from the smallest on

    attention = importlib.import_module("oxytorch.program.passes.attention")
    monkeypatch.setattr(attention, "first_win", first_win)
    model, x = Attention(True, False).eval(), torch.randn(2, 5, 16)
    shown = torch.ones(2, 5, dtype=torch.bool)
    same(compiled(model, dynamic=True)(x, shown), model(x, shown))
    if is_fast():
        assert timed == [(batch, 4, length, 4) for batch, length in attention.USUAL]
    assert "oxytorch::attention" not in seen.text


@pytest.mark.skipif(not is_fast(), reason="torch's own attention is as fast at this level")
def test_attention_whose_keys_share_memory(seen: Seen) -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        query = m.a(x).view(2, 5, 4, 4).transpose(1, 2)
        key = query[:, :1].expand(2, 4, 5, 4)
        return F.scaled_dot_product_attention(query, key, key)

    model, x = Run(attend, a=_layer()).eval(), torch.randn(2, 5, 16)
    same(compiled(model)(x), model(x))
    assert not seen.reasons and "oxytorch::attention" in seen.text


def test_a_pass_that_fails_is_left_out(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> bool:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(linear, "pays", fail)
    model, x = Run(lambda m, x: m.a(x), a=_layer()).eval(), torch.randn(3, 16)
    with caplog.at_level("INFO", "oxytorch.program"):
        same(compiled(model)(x), model(x))
    assert "made without linear.pack: no kernel for it" in caplog.text
    assert "aten::linear" in seen.text


@pytest.mark.skipif(not is_fast(), reason="torch's own attention is as fast at this level")
@pytest.mark.parametrize("by_rows", [True, False])
def test_strides_of_attention(by_rows: bool, seen: Seen) -> None:
    """Torch's result lies as the query does, ours by rows."""
    x = torch.randn(2, 4, 13, 16)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if by_rows else x
    model = Run(lambda m, x: F.scaled_dot_product_attention(x, x, x))
    found, expected = compiled(model)(x), model(x)
    same(found, expected)
    assert found.stride() == expected.stride()
    assert ("oxytorch::attention" in seen.text) is by_rows


UTILITIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm": torch.nn.utils.spectral_norm,
    "parametrized spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "old weight_norm": torch.nn.utils.weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", UTILITIES)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_weights_that_are_made_at_each_call(name: str, kind: str, seen: Seen) -> None:
    """Some put what they make of weights into the module, where users see it."""
    layer = nn.Linear(16, 16) if kind == "linear" else nn.Conv2d(8, 8, 3)
    with torch.enable_grad():
        model = UTILITIES[name](layer).eval()
    x = torch.randn(3, 16) if kind == "linear" else torch.randn(2, 8, 7, 9)
    run = torch.compile(model, backend=compile_graph)
    for _ in range(2):
        same(run(x), model(x), 1e-4)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not seen.reasons


def test_a_weight_that_its_own_graph_writes(seen: Seen) -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = _layer()

        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.mul_(0.9)
            return self.a(x)

    model = Decays()
    twin = copy.deepcopy(model)
    run, x = compiled(model), torch.randn(3, 16)
    for _ in range(5):
        same(run(x), twin(x))
    assert not seen.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_of_a_formula_are_as_near_as_its_dtype_tells(dtype: torch.dtype) -> None:
    model = Run(lambda m, x: 0.5 * x * (1 + torch.erf(x * 0.70710678)))
    x = torch.randn(64, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-15
    same(compiled(model)(x), model(x), tolerance)


def test_an_image_without_a_batch(seen: Seen) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    x = torch.randn(8, 7, 9)
    found, expected = compiled(model)(x), model(x)
    same(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode: str, seen: Seen) -> None:
    model = nn.EmbeddingBag(50, 16, mode=mode).eval()
    run = compiled(Run(lambda m, x: m.a(x), a=model))
    x = torch.randint(0, 50, (4, 6))
    same(run(x), model(x))
    assert "oxytorch::embedding_bag" in seen.text and f'"{mode}"' in seen.text


def test_training_takes_plain_weights(seen: Seen) -> None:
    model, x = nn.Sequential(_layer(), nn.GELU(), _layer()), torch.randn(3, 16)
    run = compiled(model)
    with torch.enable_grad():
        run(x).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        model(x).sum().backward()
    same(gradients, [p.grad for p in model.parameters()])
    assert len(seen.programs) == 2
    assert not any("mkldnn" in str(call.program) for call in seen.programs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gelu", "silu", "relu is apart", "RMS norm", "gate"])
def test_nan_and_infinity_come_out(name: str, value: float, seen: Seen) -> None:
    model = _lively(JOINED[name][0]())
    x = torch.randn(2, 5, 16)
    x[0, 1, 3] = value
    torch.testing.assert_close(compiled(model)(x), model(x), equal_nan=True)


def test_threads_while_weights_are_written(seen: Seen) -> None:
    model = _lively(Network())
    run = compiled(model)
    x = torch.randn(2, 3, 8, 8)
    first = model(x)
    run(x)
    model.out.bias.add_(1)  # what each thread finds to be out of date

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                same(run(x), first + 1)

    assert not errors_in_threads(work, range(4)) and not seen.reasons


def _step(target: str, *arguments: Any, **options: Any) -> Step:
    return Step(target, [*arguments], [Value(meta=torch.empty(2, 3))], **options)


def test_what_is_done_twice_is_done_once() -> None:
    x = Value(meta=torch.empty(2, 3))
    first, second = _step("aten::sin", x), _step("aten::sin", x)
    both = _step("aten::mul.Tensor", first.results[0], second.results[0])
    steps = Steps([x], {}, [first, second, both], [*both.results])  # type: ignore[list-item]
    simplify(Editor(steps, []))
    assert [step.target for step in steps.steps] == ["aten::sin", "aten::mul.Tensor"]
    assert steps.steps[1].arguments == [first.results[0], first.results[0]]


def test_outputs_stay_apart() -> None:
    """Whoever writes to one of them does not write to the other."""
    x = Value(meta=torch.empty(2, 3))
    first, second = _step("aten::sin", x), _step("aten::sin", x)
    viewed = _step("aten::view", second.results[0], ["3", "2"], is_view=True)
    copied = _step("aten::clone", x, "none")
    outputs: list[Any] = [*first.results, *viewed.results, *copied.results]
    steps = Steps([x], {}, [first, second, viewed, copied], outputs)
    simplify(Editor(steps, []))
    assert len(steps.steps) == 4


def test_steps_with_an_effect_stop_sharing() -> None:
    x = Value(meta=torch.empty(2, 3))
    first, copied = _step("aten::sin", x), _step("aten::clone", x, "none")
    written = Step("aten::copy_", [copied.results[0], x], [None], has_effect=True)
    last = _step("aten::mul.Tensor", first.results[0], copied.results[0])
    steps = Steps([x], {}, [first, copied, written, last], [*last.results])  # type: ignore[list-item]
    simplify(Editor(steps, []))
    assert len(steps.steps) == 4
