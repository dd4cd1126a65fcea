"""Networks with nested parts, in which parts are replaced, wrapped and listened to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .layers import OwnNorm, settled


class Block(nn.Module):
    """Attention and a feed-forward part, as in BERT."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)
        self.norm1, self.norm2 = nn.LayerNorm(size), OwnNorm(size)
        self.up, self.act, self.down = nn.Linear(size, 24), nn.GELU(), nn.Linear(24, size)
        self.drop = nn.Dropout(0.5)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        h = F.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.drop(self.out(h)))
        return self.norm2(x + self.scale * self.drop(self.down(self.act(self.up(x)))))


class Encoder(nn.Module):
    """Two blocks in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    """The block of a ResNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1, self.act = settled(nn.BatchNorm2d(width)), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = settled(nn.BatchNorm2d(width))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.bn1(self.conv1(x)))
        return self.act(self.drop(self.bn2(self.conv2(h))) + x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), settled(nn.BatchNorm2d(8)), nn.LeakyReLU(0.1)
        )
        self.blocks = nn.Sequential(Residual(), Residual())
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


def encoder() -> nn.Module:
    return Encoder().eval()


def images() -> nn.Module:
    return Images().eval()


def deep() -> nn.Module:
    """Sequentials inside a Sequential."""

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.5), nn.LayerNorm(12))

    return nn.Sequential(part(), nn.Sequential(part(), nn.Linear(12, 12), nn.SiLU())).eval()


def _sample(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(5))


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
    "encoder": (encoder, _sample(2, 5, 12)),
    "images": (images, _sample(2, 3, 8, 8)),
    "deep": (deep, _sample(3, 12)),
}
