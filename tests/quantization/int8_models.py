"""Small networks of the kinds that are quantized, and what plain PyTorch makes of integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.quantization import Int8StaticActivationInt8Weight, prepare


class Residual(nn.Module):
    """Convolutions with batch norms, a shortcut, a depthwise layer, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.inner, self.inner_norm = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.last, self.last_norm = nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.shortcut, self.shortcut_norm = nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.head = nn.Linear(32, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.first_norm(self.first(x))), 3, 2, 1)
        inner = torch.relu(self.inner_norm(self.inner(x)))
        x = torch.relu(self.last_norm(self.last(inner)) + self.shortcut_norm(self.shortcut(x)))
        x = self.pointwise(F.relu6(self.depthwise(x))) + x
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Shuffled(nn.Module):
    """Two branches that are concatenated and whose channels are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.left, self.right = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.last = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
        result: Tensor = self.last(F.channel_shuffle(x, 2))
        return result


class Block(nn.Module):
    """One layer of a transformer, with attention written out."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = nn.LayerNorm(width)

    def _parts(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self._parts(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = self.norm(x + self.out(mixed))
        result: Tensor = self.last(x + self.down(F.gelu(self.up(x))))
        return result


def calibrated(
    model: nn.Module,
    calls: Sequence[Tensor],
    config: Int8StaticActivationInt8Weight | None = None,
) -> nn.Module:
    """The model prepared by the first of the calls, and called with all of them."""
    prepared = prepare(model, config or Int8StaticActivationInt8Weight(), calls[0])
    for each in calls:
        prepared(each)
    return prepared


def run(model: nn.Module, *args: Tensor) -> Tensor:
    """A model's result, without gradients."""
    with torch.no_grad():
        found: Tensor = model(*args)
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """The size of the difference beside that of what is wanted."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class PreNorm(Block):
    """A block that normalizes before its layers, as most newer transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        parts = (self._parts(layer(given)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.last(x))))
        return result


class Gated(nn.Module):
    """A gated network behind an RMS normalization, with its sum, as language models have it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.gate, self.up = nn.Linear(width, 48, bias=False), nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Chain(nn.Module):
    """Convolutions in a row, whose channels differ in size: one with groups, and one of each
    channel, padding and pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3)
        self.groups = nn.Conv2d(12, 48, 3, groups=3)
        self.norm = nn.BatchNorm2d(48)
        self.each = nn.Conv2d(48, 48, 3, groups=48)
        self.last = nn.Conv2d(48, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.norm(self.groups(F.pad(x, (1, 1, 1, 1)))))
        x = F.max_pool2d(self.each(F.pad(x, (0, 1, 0, 1))), 2)
        result: Tensor = self.head(self.last(F.relu(x)).mean((2, 3)))
        return result


def with_outliers(model: Block, size: float = 60.0) -> Block:
    """The block with a few huge channels behind its normalizations, which its layers weigh little,
    as large language models have them."""
    channels = [3, 17, 40]
    with torch.no_grad():
        for norm in (model.norm, model.last):
            norm.weight[channels] *= size
            norm.bias[channels] += size / 3
        for layer in (model.query, model.key, model.value, model.up):
            layer.weight[:, channels] /= size / 2
    return model
