"""Convolution networks as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _TimeBlock(nn.Module):
    """A residual block of a diffusion model: group norm, SiLU, and the time added in the middle."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, 1, 1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * outside))
        self.norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x)
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        hidden = F.silu(self.norm(hidden) * (1 + scale) + shift)
        return self.skip(x) + self.second(hidden)


class _ImageAttention(nn.Module):
    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        flat = self.norm(x).view(batch, channels, height * width)
        q, k, v = self.qkv(flat).view(batch, 3, self.heads, -1, height * width).unbind(1)
        weights = torch.einsum("bhcq,bhck->bhqk", q, k) / math.sqrt(q.shape[2])
        mixed = torch.einsum("bhqk,bhck->bhcq", weights.softmax(-1), v)
        return x + self.out(mixed.reshape(batch, channels, -1)).view_as(x)


class DiffusionUNet(nn.Module):
    """The denoiser of a diffusion model, called with images and steps."""

    def __init__(self, channels: int = 16, time: int = 32) -> None:
        super().__init__()
        self.time_size = time
        self.embed = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            [_TimeBlock(channels, channels, time), _TimeBlock(channels, 2 * channels, time)]
        )
        self.shrink = nn.ModuleList(
            [nn.Conv2d(channels, channels, 3, 2, 1), nn.Conv2d(2 * channels, 2 * channels, 3, 2, 1)]
        )
        self.middle = _TimeBlock(2 * channels, 2 * channels, time)
        self.attention = _ImageAttention(2 * channels)
        self.up = nn.ModuleList(
            [_TimeBlock(4 * channels, channels, time), _TimeBlock(2 * channels, channels, time)]
        )
        self.leave = nn.Sequential(
            nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, 1, 1)
        )

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        half = self.time_size // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        angles = steps[:, None].to(x.dtype) * rates.to(x.dtype)
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.enter(x)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.leave(x)


class GAN(nn.Module):
    """A generator of images from noise."""

    def __init__(self, noise: int = 16, channels: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise, 4 * channels, 4, 1, 0, bias=False)]
        for inside, outside in ((4, 2), (2, 1)):
            layers += [
                nn.BatchNorm2d(inside * channels),
                nn.ReLU(True),
                nn.ConvTranspose2d(inside * channels, outside * channels, 4, 2, 1, bias=False),
            ]
        layers += [
            nn.BatchNorm2d(channels),
            nn.ReLU(True),
            nn.ConvTranspose2d(channels, 3, 4, 2, 1),
            nn.Tanh(),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise[:, :, None, None])


class _Residual(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + x


class ConvMixer(nn.Sequential):
    """Patches, then depthwise and pointwise convolutions with GELU and batch norm."""

    def __init__(self, size: int = 16, depth: int = 2) -> None:
        blocks = [
            nn.Sequential(
                _Residual(
                    nn.Sequential(
                        nn.Conv2d(size, size, 5, groups=size, padding="same"),
                        nn.GELU(),
                        nn.BatchNorm2d(size),
                    )
                ),
                nn.Conv2d(size, size, 1),
                nn.GELU(),
                nn.BatchNorm2d(size),
            )
            for _ in range(depth)
        ]
        super().__init__(
            nn.Conv2d(3, size, 4, stride=4),
            nn.GELU(),
            nn.BatchNorm2d(size),
            *blocks,
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(size, 5),
        )


@dataclass
class Reconstruction:
    """What the autoencoder returns."""

    image: Tensor
    mean: Tensor
    spread: Tensor


class VariationalAutoencoder(nn.Module):
    """Encoder, a sample in training only, decoder; returns a dataclass."""

    def __init__(self, hidden: int = 40, latent: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ELU())
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ELU(), nn.Linear(hidden, 784))

    def forward(self, x: Tensor) -> Reconstruction:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), torch.exp(0.5 * self.log_variance(hidden))
        latent = mean + spread * torch.randn_like(spread) if self.training else mean
        return Reconstruction(torch.sigmoid(self.decoder(latent)).view_as(x), mean, spread)


class _DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inside), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inside, 2 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(2 * growth), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseNet(nn.Module):
    """Every layer sees all features before it."""

    def __init__(self, growth: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.ModuleList()
        size = 16
        for _ in range(2):
            self.blocks.append(
                nn.ModuleList(_DenseLayer(size + i * growth, growth) for i in range(layers))
            )
            size += layers * growth
        self.norm = nn.BatchNorm2d(size)
        self.classifier = nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for block in self.blocks:
            for layer in block:
                features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inside, 1), nn.Conv2d(inside, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.mean(x, (2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(scale), inplace=True)))


def _normalized(
    convolution: nn.Conv2d, act: type[nn.Module]
) -> tuple[nn.Conv2d, nn.BatchNorm2d, nn.Module]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), act(inplace=True)


class _InvertedResidual(nn.Module):
    def __init__(
        self, inside: int, outside: int, stride: int, gate: bool, act: type[nn.Module]
    ) -> None:
        super().__init__()
        wide = 3 * inside
        layers: list[Any] = [
            *_normalized(nn.Conv2d(inside, wide, 1, bias=False), act),
            *_normalized(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), act),
        ]
        if gate:
            layers.append(_SqueezeExcitation(wide, inside // 2))
        layers += [nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


def _classifier(channels: int, *dropout: nn.Module) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), *dropout, nn.Linear(channels, 5)


class EfficientNet(nn.Sequential):
    """Inverted residuals with SiLU and squeeze-excitation."""

    def __init__(self) -> None:
        super().__init__(
            *_normalized(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.SiLU),
            _InvertedResidual(8, 8, 1, True, nn.SiLU),
            _InvertedResidual(8, 16, 2, True, nn.SiLU),
            *_normalized(nn.Conv2d(16, 32, 1, bias=False), nn.SiLU),
            *_classifier(32, nn.Dropout(0.2)),
        )


class MobileNet(nn.Sequential):
    """Inverted residuals with ReLU6 and hard swish."""

    def __init__(self) -> None:
        super().__init__(
            *_normalized(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.Hardswish),
            _InvertedResidual(8, 8, 1, False, nn.ReLU6),
            _InvertedResidual(8, 16, 2, True, nn.Hardswish),
            *_classifier(16),
        )


class SiameseNetwork(nn.Module):
    """One network for both images, then the distance of what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(
            nn.Conv2d(3, 8, 5),
            nn.PReLU(8),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.PReLU(),
            nn.AdaptiveMaxPool2d(3),
            nn.Flatten(),
            nn.Linear(144, 24),
            nn.BatchNorm1d(24),
            nn.LeakyReLU(0.1),
            nn.Linear(24, 8),
        )
        self.head = nn.Linear(8, 1)

    def embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.embedding(x), dim=-1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.embed(first), self.embed(second)
        return F.pairwise_distance(a, b), self.head((a - b).abs()).squeeze(-1)


class SpectralDiscriminator(nn.Module):
    """Convolutions under spectral normalization, of both of torch's kinds, with a feature list."""

    def __init__(self) -> None:
        super().__init__()
        new = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(
            [
                new(nn.Conv2d(3, 8, 4, 2, 1)),
                nn.utils.spectral_norm(nn.Conv2d(8, 16, 4, 2, 1)),
                nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3, 1, 1)),
            ]
        )
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.head = new(nn.Linear(16 * 64, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
            features.append(x)
        return self.head(self.norm(x).flatten(1)), features


class CapsuleNetwork(nn.Module):
    """Capsules that vote: vectors of squashed length, routed by agreement three times."""

    def __init__(self, capsules: int = 4, size: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 5, 2)
        self.primary = nn.Conv2d(16, 4 * size, 3, 2)
        self.votes = nn.Parameter(torch.randn(capsules, 4 * 9, size, size) * 0.1)
        self.size = size

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        length = x.pow(2).sum(-1, keepdim=True)
        return length / (1 + length) * x / (length.sqrt() + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(F.relu(self.convolution(x)))
        x = self.squash(x.view(x.shape[0], -1, self.size))
        votes = torch.einsum("cnij,bni->bcnj", self.votes.to(x.dtype), x)
        logits = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            out = self.squash((logits.softmax(1) * votes).sum(2, keepdim=True))
            logits = logits + (votes * out).sum(-1, keepdim=True)
        return out.squeeze(2).norm(dim=-1)


class UNet3d(nn.Module):
    """A U-Net for volumes: instance norm, leaky ReLU, transposed convolutions."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.encode1, self.encode2 = self.block(1, channels), self.block(channels, 2 * channels)
        self.bottom = self.block(2 * channels, 4 * channels)
        self.up2 = nn.ConvTranspose3d(4 * channels, 2 * channels, 2, 2)
        self.decode2 = self.block(4 * channels, 2 * channels)
        self.up1 = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.decode1 = self.block(2 * channels, channels)
        self.head = nn.Conv3d(channels, 3, 1)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inside, outside, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outside, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv3d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm3d(outside),
            nn.LeakyReLU(0.01, inplace=True),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.encode1(x)
        second = self.encode2(F.max_pool3d(first, 2))
        bottom = self.bottom(F.max_pool3d(second, 2))
        x = self.decode2(torch.cat((self.up2(bottom), second), dim=1))
        x = self.decode1(torch.cat((self.up1(x), first), dim=1))
        return {"logits": self.head(x), "bottom": bottom.mean((2, 3, 4))}
