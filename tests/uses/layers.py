"""Small models with one layer of each kind that `optimize` packs, folds or joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tiny import TiedEmbedding


class Kind(NamedTuple):
    """A model, what it is called with, and the tensors in it that are written to."""

    build: Callable[[], nn.Module]
    sample: Callable[[], torch.Tensor]
    targets: tuple[str, ...]
    form: str = "default"


def settled(norm: Any) -> Any:
    """Give a batch normalization statistics and factors as after training."""
    with torch.no_grad():
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0, 0.3)
    return norm


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 6)).eval()


def eight_bits() -> nn.Module:
    """The same with weights that 8 bits hold exactly, and halves and doubles of them too."""
    model = mlp()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            codes = torch.randint(-127, 128, layer.weight.shape)
            codes[:, 0] = 127
            layer.weight.copy_(codes / 512)
    return model


def gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 6)).eval()


def convolution(dim: int, **options: Any) -> Callable[[], nn.Module]:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    return lambda: nn.Sequential(kind(4, 8, 3, padding=1, **options), nn.ReLU()).eval()


def convolution_norm(dim: int) -> Callable[[], nn.Module]:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]
    return lambda: nn.Sequential(kind(4, 8, 3, padding=1), settled(norm(8)), nn.ReLU()).eval()


def linear_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), settled(nn.BatchNorm1d(8)), nn.ReLU()).eval()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x)


class TwoNames(nn.Module):
    """Two linear layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


class Conv1D(nn.Module):
    """The linear layer of GPT-2, whose weight stands the other way round."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D as Layer

        super().__init__()
        self.layer = Layer(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.layer(x))


class SelfAttention(nn.Module):
    """Query, key and value of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.o(F.scaled_dot_product_attention(q, k, v))


class Gated(nn.Module):
    """The feed-forward layer of Llama with the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(12, eps=1e-6)
        self.gate, self.up = nn.Linear(12, 24, bias=False), nn.Linear(12, 24, bias=False)
        self.down = nn.Linear(24, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OwnNorm(nn.Module):
    """An RMS norm as models write it themselves."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class Normed(nn.Module):
    """Residual addition and normalization, LayerNorm and an own RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.own = nn.LayerNorm(12), OwnNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.first(x))
        return self.own(x + self.second(x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 8, mode="sum")
        self.out = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(ids))


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def _floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def _ids(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(5))


FOLDED = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")

KINDS = {
    "linear": Kind(mlp, _floats(5, 12), ("0.weight", "0.bias", "2.weight")),
    "gelu": Kind(gelu_mlp, _floats(5, 12), ("0.weight",)),
    "conv1d": Kind(convolution(1), _floats(2, 4, 10), ("0.weight", "0.bias")),
    "conv2d": Kind(convolution(2), _floats(2, 4, 6, 6), ("0.weight", "0.bias")),
    "conv3d": Kind(convolution(3), _floats(2, 4, 4, 4, 4), ("0.weight",)),
    "grouped": Kind(convolution(2, groups=4), _floats(2, 4, 6, 6), ("0.weight",)),
    "reflect": Kind(convolution(2, padding_mode="reflect"), _floats(2, 4, 6, 6), ("0.weight",)),
    "transposed": Kind(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.ReLU()).eval(),
        _floats(2, 4, 6, 6),
        ("0.weight",),
    ),
    "conv1d_norm": Kind(convolution_norm(1), _floats(2, 4, 10), FOLDED),
    "conv2d_norm": Kind(convolution_norm(2), _floats(2, 4, 6, 6), FOLDED),
    "linear_norm": Kind(linear_norm, _floats(5, 12), FOLDED),
    "lstm": Kind(
        lambda: Recurrent().eval(),
        _floats(2, 5, 6),
        ("lstm.weight_ih_l0", "lstm.weight_hh_l1_reverse", "lstm.bias_hh_l0"),
    ),
    "tied": Kind(lambda: TiedEmbedding(40, 12).eval(), _ids(2, 5), ("embed.weight", "head.weight")),
    "two_names": Kind(lambda: TwoNames().eval(), _floats(5, 12), ("first.weight", "second.weight")),
    "hf_conv1d": Kind(lambda: Conv1D().eval(), _floats(2, 5, 12), ("layer.weight", "layer.bias")),
    "joined": Kind(
        lambda: SelfAttention().eval(), _floats(2, 5, 12), ("q.weight", "v.bias"), "join"
    ),
    "gated": Kind(
        lambda: Gated().eval(), _floats(2, 5, 12), ("gate.weight", "up.weight", "norm.weight")
    ),
    "normed": Kind(
        lambda: Normed().eval(), _floats(2, 5, 12), ("norm.weight", "norm.bias", "own.weight")
    ),
    "bag": Kind(lambda: Bag().eval(), _ids(4, 6), ("bag.weight",)),
    "attention": Kind(
        lambda: Attended().eval(),
        _floats(2, 5, 12),
        ("attention.in_proj_weight", "attention.out_proj.weight"),
    ),
}
