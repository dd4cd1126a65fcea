"""Trains a U-Net as diffusion models have it, at another resolution and batch in each step."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from program import parser, running


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)])
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](y)))


class SelfAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        heads = [
            each.view(batch, -1, channels // 64, 64).transpose(1, 2)
            for each in self.qkv(y).chunk(3, -1)
        ]
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, -1, channels)
        return x + self.out(y).transpose(1, 2).view(batch, channels, height, width)


class UNet(nn.Module):
    """Three resolutions, two blocks at each, attention at the two lower ones."""

    def __init__(self, channels: int, image: int = 4) -> None:
        super().__init__()
        self.channels, time = channels, 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(image, channels, 3, padding=1)
        widths = [channels, 2 * channels, 4 * channels]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        now, skips = channels, [channels]
        for level, width in enumerate(widths):
            for _ in range(2):
                self.down.append(self._block(now, width, time, level > 0))
                now = width
                skips.append(now)
            if level < 2:
                self.down.append(nn.Conv2d(now, now, 3, 2, 1))
                skips.append(now)
        self.middle = self._block(now, now, time, True)
        for level, width in reversed([*enumerate(widths)]):
            for _ in range(3):
                self.up.append(self._block(now + skips.pop(), width, time, level > 0))
                now = width
            if level:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.last = nn.Sequential(
            nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, image, 3, padding=1)
        )

    def _block(self, inputs: int, outputs: int, time: int, attends: bool) -> nn.Module:
        parts: list[nn.Module] = [Residual(inputs, outputs, time)]
        return nn.ModuleList(parts + ([SelfAttention(outputs)] if attends else []))

    def _run(self, block: nn.Module, x: Tensor, time: Tensor) -> Tensor:
        if isinstance(block, nn.Conv2d):
            return block(x)
        x = block[0](x, time)
        return block[1](x) if len(block) > 1 else x

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        rates = torch.exp(
            -9.2 * torch.arange(self.channels // 2, device=x.device) * 2 / self.channels
        )
        angles = steps[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.first(x)
        skips = [x]
        for block in self.down:
            x = self._run(block, x, time)
            skips.append(x)
        x = self._run(self.middle, x, time)
        for block in self.up:
            if isinstance(block, nn.Conv2d):
                x = block(F.interpolate(x, size=skips[-1].shape[2:], mode="nearest"))
            else:
                x = self._run(block, torch.cat([x, skips.pop()], 1), time)
        return self.last(x)


def main() -> None:
    arguments = parser(
        __doc__ or "", channels=192, steps=12, batch=8, smallest=32, largest=128
    ).parse_args()
    choose = random.Random(arguments.seed)
    kind = arguments.device.split(":")[0]
    with running(arguments) as mark:
        with torch.device(arguments.device):
            model = UNet(arguments.channels)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(arguments.steps):
            height, width = (
                8 * choose.randint(arguments.smallest // 8, arguments.largest // 8)
                for _ in range(2)
            )
            batch = choose.randint(1, arguments.batch)
            mark(f"step {step}: {batch} of {height} x {width}")
            clean = torch.randn(batch, 4, height, width, device=arguments.device)
            noise = torch.randn_like(clean)
            times = torch.randint(1000, (batch,), device=arguments.device)
            with torch.autocast(kind, torch.bfloat16):
                found = model(clean + noise, times.float())
                loss = F.mse_loss(found.float(), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
