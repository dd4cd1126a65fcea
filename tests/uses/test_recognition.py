"""What `optimize` takes for a formula that it knows is that formula, for every input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .compare import Log
from .layers import settled

Function = Callable[[torch.Tensor], torch.Tensor]

NEAR_ACTIVATIONS: dict[str, Function] = {
    "clipped_gelu": lambda x: torch.clip(F.gelu(x), -10, 10),
    "clipped_gelu_low": lambda x: torch.clip(F.gelu(x), -0.1, 100),
    "gelu_where": lambda x: torch.where(x > 40, x * 2, F.gelu(x)),
    "gelu_where_negative": lambda x: torch.where(x < -40, x, F.gelu(x)),
    "gelu_by_erf": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_by_erf_short": lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)),
    "gelu_by_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_by_tanh_other": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.0447 * x**3)))
    ),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "quick_gelu_other": lambda x: x * torch.sigmoid(1.7 * x),
    "silu_by_sigmoid": lambda x: x * torch.sigmoid(x),
    "silu_clamped": lambda x: (x * torch.sigmoid(x)).clamp(max=30),
    "silu_of_clamped": lambda x: F.silu(x.clamp(-20, 20)),
    "relu_by_max": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "relu_squared": lambda x: F.relu(x).square(),
    "relu_leaky_tiny": lambda x: F.leaky_relu(x, 1e-7),
    "relu_of_shifted": lambda x: F.relu(x - 1e-4),
    "relu6": lambda x: F.relu6(x),
    "relu20": lambda x: x.clamp(0, 20),
    "hardswish_by_hand": lambda x: x * F.relu6(x + 3) / 6,
    "mish_by_hand": lambda x: x * torch.tanh(F.softplus(x)),
    "softplus_threshold": lambda x: F.softplus(x, threshold=5),
    "nan_to_num": lambda x: torch.nan_to_num(F.gelu(x)),
    "relu_nan_safe": lambda x: torch.where(torch.isnan(x), torch.zeros_like(x), F.relu(x)),
    "gelu_rounded": lambda x: F.gelu(x).bfloat16().float(),
    "gelu_in_double": lambda x: F.gelu(x.double()).float(),
    "gelu_of_absolute": lambda x: torch.where(x.abs() < 1e-3, x * 0.6, F.gelu(x)),
    "step": lambda x: torch.where(x == 0.5, torch.ones_like(x), F.silu(x)),
    "shape_dependent": lambda x: F.gelu(x) if x.shape[0] < 9 else F.relu(x),
}


class Own(nn.Module):
    """A class of the user's own that computes a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _between(middle: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 12), middle, nn.Linear(12, 6)).eval()
    return nn.ModuleDict({"alone": middle, "model": model}).eval()


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-3, 0.5, 45.0, -45.0, 1e20, -1e20, 1e-40]


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 12, generator=generator)
    special = x.clone()
    special[1] = torch.tensor(SPECIAL)
    return [x, x * 30, special, torch.cat([x, x, x])]


class Both(nn.Module):
    """An activation alone and after a layer, in one answer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle, self.first, self.last = middle, nn.Linear(12, 12), nn.Linear(12, 6)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(12))
            self.first.bias.zero_()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.middle(self.first(x))
        return h, self.middle(x), self.last(h)


@pytest.mark.parametrize("form", ["default", "sample"])
@pytest.mark.parametrize("name", [*NEAR_ACTIVATIONS])
def test_own_activation(check: Callable[..., None], name: str, form: str) -> None:
    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            for x in _inputs():
                log([*model(x)], [*model(x)])

    check(lambda: Both(Own(NEAR_ACTIVATIONS[name])).eval(), use, form, lambda: _inputs()[0])


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU_inplace": lambda: nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6,
    "LeakyReLU": lambda: nn.LeakyReLU(0.1),
    "LeakyReLU_negative": lambda: nn.LeakyReLU(-0.5),
    "ELU": lambda: nn.ELU(0.7),
    "CELU": nn.CELU,
    "SELU": nn.SELU,
    "GELU": nn.GELU,
    "GELU_tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardtanh": lambda: nn.Hardtanh(-0.5, 2),
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Hardshrink": nn.Hardshrink,
    "Softshrink": nn.Softshrink,
    "Tanhshrink": nn.Tanhshrink,
    "Threshold": lambda: nn.Threshold(0.1, 20),
    "PReLU": nn.PReLU,
    "PReLU_channels": lambda: nn.PReLU(12),
    "RReLU": nn.RReLU,
    "Softmax": lambda: nn.Softmax(-1),
    "GLU": lambda: nn.Sequential(nn.GLU(), nn.Linear(6, 12)),
}


@pytest.mark.parametrize("form", ["default", "sample", "program"])
@pytest.mark.parametrize("name", [*ACTIVATIONS])
def test_special_values_through_linear(check: Callable[..., None], name: str, form: str) -> None:
    def use(model: Any, log: Log) -> None:
        for x in _inputs():
            with torch.no_grad():
                log([*model(x.clone())], [*model(x.clone())])

    check(lambda: Both(ACTIVATIONS[name]()).eval(), use, form, lambda: _inputs()[0])


def _images(dim: int) -> list[torch.Tensor]:
    shape = (2, 4, *[6] * dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    special = x.clone()
    for i, value in enumerate(SPECIAL):
        special[i % 2].view(-1)[i] = value
    return [x, x * 30, special]


@pytest.mark.parametrize("norm", ["plain", "norm", "residual"])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n not in ("GLU", "PReLU_channels")])
def test_special_values_through_convolution(
    check: Callable[..., None], name: str, dim: int, norm: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
            self.conv = convolution(4, 4, 1)
            batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]
            self.norm = settled(batch_norm(4)) if norm == "norm" else nn.Identity()
            self.act = ACTIVATIONS[name]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.conv(x))
            return self.act(h + x) if norm == "residual" else self.act(h)

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            for x in _images(dim):
                log(model(x.clone()), model(x.clone()))

    check(lambda: Model().eval(), use, "default", lambda: _images(dim)[0])


def _own_norm(
    upcast: bool, inside: bool, plus_one: bool, centered: bool, order: str, eps: float
) -> Callable[[], nn.Module]:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(12) * 0.5 + 0.5)
            self.bias = nn.Parameter(torch.rand(12)) if centered else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtype = x.dtype
            h = x.float() if upcast else x
            if centered:
                h = h - h.mean(-1, keepdim=True)
            mean = h.pow(2).mean(-1, keepdim=True)
            h = h * torch.rsqrt(mean + eps) if inside else h / (mean.sqrt() + eps)
            weight = 1 + self.weight if plus_one else self.weight
            h = (h * weight).to(dtype) if order == "weight_first" else h.to(dtype) * weight
            return h if self.bias is None else h + self.bias

    return Norm


@pytest.mark.parametrize("eps", [1e-6, 0.1, 0.0])
@pytest.mark.parametrize(
    ("upcast", "inside", "plus_one", "centered", "order"),
    [
        *itertools.product(
            [True, False],
            [True, False],
            [True, False],
            [True, False],
            ["weight_first", "cast_first"],
        )
    ],
)
def test_own_norm(
    check: Callable[..., None],
    upcast: bool,
    inside: bool,
    plus_one: bool,
    centered: bool,
    order: str,
    eps: float,
) -> None:
    def build() -> nn.Module:
        return Both(_own_norm(upcast, inside, plus_one, centered, order, eps)()).eval()

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            for x in (*_inputs(), _inputs()[0] * 1e-4, _inputs()[0] * 0, _inputs()[0] + 100):
                log([*model(x)])
            log(model.middle(_inputs()[0].bfloat16()))
            log(model.middle(_inputs()[0].double()))

    # A variance of nearly constant numbers is known only to a few digits.
    check(build, use, "default", lambda: _inputs()[0], tolerance=1e-4 if centered else 1e-5)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rms_eps_0": (lambda: nn.RMSNorm(12, eps=0.0), (4, 12)),
    "rms_eps_none": (lambda: nn.RMSNorm(12), (4, 12)),
    "rms_eps_large": (lambda: nn.RMSNorm(12, eps=1.0), (4, 12)),
    "rms_two_dims": (lambda: nn.RMSNorm((3, 12)), (2, 3, 12)),
    "rms_no_weight": (lambda: nn.RMSNorm(12, elementwise_affine=False), (4, 12)),
    "layer_eps_0": (lambda: nn.LayerNorm(12, eps=0.0), (4, 12)),
    "layer_3d": (lambda: nn.LayerNorm(12), (2, 3, 12)),
    "layer_two_dims": (lambda: nn.LayerNorm((3, 12)), (2, 3, 12)),
    "layer_no_bias": (lambda: nn.LayerNorm(12, bias=False), (4, 12)),
    "layer_no_weight": (lambda: nn.LayerNorm(12, elementwise_affine=False), (4, 12)),
    "layer_1d": (lambda: nn.LayerNorm(12), (12,)),
    "group": (lambda: nn.GroupNorm(3, 12), (2, 12, 5)),
    "group_2d": (lambda: nn.GroupNorm(3, 12), (2, 12)),
    "instance": (lambda: nn.InstanceNorm1d(12), (2, 12, 5)),
    "instance_tracked": (
        lambda: nn.InstanceNorm1d(12, affine=True, track_running_stats=True),
        (2, 12, 5),
    ),
    "batch_1d": (lambda: settled(nn.BatchNorm1d(12)), (4, 12)),
    "batch_1d_of_3d": (lambda: settled(nn.BatchNorm1d(12)), (4, 12, 5)),
    "batch_1d_square": (lambda: settled(nn.BatchNorm1d(12)), (4, 12, 12)),
    "batch_eps_0": (lambda: settled(nn.BatchNorm1d(12, eps=0.0)), (4, 12)),
    "batch_no_affine": (lambda: nn.BatchNorm1d(12, affine=False), (4, 12)),
    "batch_no_statistics": (lambda: nn.BatchNorm1d(12, track_running_stats=False), (4, 12)),
    "local_response": (lambda: nn.LocalResponseNorm(3), (2, 12, 5)),
}


@pytest.mark.parametrize("form", ["default", "sample"])
@pytest.mark.parametrize("name", [*NORMS])
def test_norm(check: Callable[..., None], name: str, form: str) -> None:
    build, shape = NORMS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            for value in (
                x,
                x * 1e-4,
                x * 0,
                x + 50,
                x.transpose(0, -1).contiguous().transpose(0, -1),
            ):
                log(model(value))
            special = x.clone()
            special.view(-1)[3] = math.nan
            special.view(-1)[-2] = math.inf
            log(model(special))
        log(model(x))

    check(lambda: nn.Sequential(build()).eval(), use, form, x, tolerance=1e-4)


LAYER_AND_NORM: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]
] = {
    "linear_2d": (lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), (4, 8)),
    "linear_3d_square": (lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), (4, 8, 8)),
    "linear_3d": (lambda: nn.Linear(6, 7), lambda: nn.BatchNorm1d(5), (4, 5, 6)),
    "linear_of_3d_after_2d": (lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), (4, 8)),
    "linear_no_bias": (lambda: nn.Linear(8, 8, bias=False), lambda: nn.BatchNorm1d(8), (4, 8)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3), lambda: nn.BatchNorm1d(6), (4, 8, 9)),
    "conv1d_unbatched": (lambda: nn.Conv1d(8, 6, 3), lambda: nn.BatchNorm1d(6), (8, 9)),
    "conv1d_square_unbatched": (lambda: nn.Conv1d(8, 6, 3), lambda: nn.BatchNorm1d(6), (8, 8)),
    "conv2d_instance": (lambda: nn.Conv2d(4, 6, 3), lambda: nn.InstanceNorm2d(6), (2, 4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), lambda: nn.BatchNorm2d(6), (2, 4, 6, 6)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), lambda: nn.BatchNorm2d(8), (2, 4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), lambda: nn.BatchNorm2d(8), (2, 4, 6, 6)),
    "sync": (lambda: nn.Conv2d(4, 8, 3), lambda: nn.SyncBatchNorm(8), (2, 4, 6, 6)),
}


@pytest.mark.parametrize("form", ["default", "sample"])
@pytest.mark.parametrize("name", [*LAYER_AND_NORM])
def test_layer_and_batch_norm(check: Callable[..., None], name: str, form: str) -> None:
    layer, norm, shape = LAYER_AND_NORM[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))

    def build() -> nn.Module:
        made: Any = norm()
        return nn.Sequential(layer(), settled(made) if made.affine else made, nn.ReLU()).eval()

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            log(model(x), model(x))
            if name == "linear_of_3d_after_2d":
                log(model(torch.cat([x] * 8).view(4, 8, 8)), model(x))
            broken = x.clone()
            broken.view(-1)[5] = math.nan
            log(model(broken))
        log(model(x))

    check(build, use, form, x)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": lambda h: F.relu_(h) * h,
    "relu_flag": lambda h: F.relu(h, inplace=True) * h,
    "silu_module": lambda h: nn.SiLU(inplace=True)(h) * h,
    "elu": lambda h: F.elu(h, 1.0, True) + h,
    "leaky": lambda h: F.leaky_relu_(h, 0.2) + h,
    "hardswish": lambda h: F.hardswish(h, inplace=True) + h,
    "hardtanh": lambda h: F.hardtanh_(h, -0.1, 0.2) + h,
    "relu6": lambda h: F.relu6(h, inplace=True) + h,
    "mish": lambda h: F.mish(h, inplace=True) + h,
    "dropout": lambda h: F.dropout(h, 0.5, False, True) + h,
    "tanh_method": lambda h: h.tanh_() + h,
    "sigmoid_method": lambda h: h.sigmoid_() + h,
    "add_method": lambda h: h.add_(1) + h,
    "view_before": lambda h: (h.view(-1), F.relu_(h))[0] * 1,
    "slice_after": lambda h: (F.relu_(h)[..., :2], h),
    "half_of_it": lambda h: (F.relu_(h[..., :3]), h)[1] * 1,
    "index_put": lambda h: (h.index_fill_(-1, torch.tensor([1]), 3.0), h)[1] * 1,
}


@pytest.mark.parametrize("layer", ["linear", "conv", "norm", "conv_norm", "identity"])
@pytest.mark.parametrize("name", [*IN_PLACE])
def test_in_place_activation_whose_input_is_used_again(
    check: Callable[..., None], name: str, layer: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = {
                "linear": lambda: nn.Linear(12, 12),
                "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
                "norm": lambda: nn.LayerNorm(12),
                "conv_norm": lambda: nn.Sequential(
                    nn.Conv1d(4, 4, 3, padding=1), settled(nn.BatchNorm1d(4))
                ),
                "identity": nn.Identity,
            }[layer]()

        def forward(self, x: torch.Tensor) -> Any:
            return IN_PLACE[name](self.layer(x)), x

    def use(model: Any, log: Log) -> None:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2, 4, 12, generator=generator)
        with torch.no_grad():
            for _ in range(2):
                given = x.clone()
                log(model(given), given)

    check(lambda: Model().eval(), use)


@pytest.mark.parametrize("form", ["default", "sample", "program"])
@pytest.mark.parametrize("masked", ["none", "padding", "causal", "both"])
def test_transformer_encoder(check: Callable[..., None], masked: str, form: str) -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given: dict[str, Any] = {}
    if masked in ("padding", "both"):
        given["src_key_padding_mask"] = padding
    if masked in ("causal", "both"):
        given["mask"] = causal

    def use(model: Any, log: Log) -> None:
        x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            for _ in range(3):
                log(model(x, **given))
        log(model(x, **given))

    sample = {"src": torch.randn(2, 5, 12), **given}
    check(build, use, form, sample)


@pytest.mark.parametrize("form", ["join", "all", "program"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
@pytest.mark.parametrize("change", ["none", "mul_", "slice", "view", "other", "same_values"])
def test_input_changes_between_joined_layers(
    check: Callable[..., None], change: str, mode: str, form: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
            self.flag = False

        def forward(self, x: torch.Tensor) -> Any:
            x = x * 1.5
            a = self.q(x)
            if self.flag:
                if change == "mul_":
                    x.mul_(2)
                elif change == "slice":
                    x[..., 0] = 3
                elif change == "view":
                    x.view(-1).add_(1)
                elif change == "other":
                    x = x * 2
                elif change == "same_values":
                    x = x.clone()
            return a, self.k(x), self.v(x)

    def use(model: Any, log: Log) -> None:
        x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(5))
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with modes.get(mode, torch.enable_grad)():
            for flag in (False, True, True, False):
                model.flag = flag
                try:
                    log(model(x))
                except RuntimeError as error:
                    log(error)

    check(lambda: Model().eval(), use, form, lambda: torch.randn(2, 5, 12))


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 12) @ self.weight


class _FlatRelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).flatten(1)


class _NormOverSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


class _LayerNormOverSecond(_NormOverSecond):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        return self.weight * (centered * torch.rsqrt(centered.pow(2).mean(1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("form", ["default", "sample", "all"])
@pytest.mark.parametrize("kind", [_NormOverSecond, _LayerNormOverSecond, _Flat, _FlatRelu])
def test_a_formula_of_matrices_alone_is_not_taken(
    check: Callable[..., None], kind: type[nn.Module], form: str
) -> None:
    def use(model: Any, log: Any) -> None:
        for size in ((2, 5, 12), (2, 3, 12, 12), (5, 12)):
            with torch.no_grad():
                log(model(torch.randn(size)))

    check(lambda: nn.Sequential(nn.Linear(12, 12), kind()).eval(), use, form, torch.randn(2, 5, 12))
