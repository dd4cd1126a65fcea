"""Trains ResNet-152: a smaller last batch, larger ones in evaluation, loading meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from program import Mark, parser, running


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.parts = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.parts(x) + self.skip(x), inplace=True)


def resnet(counts: tuple[int, ...], width: int = 64) -> nn.Sequential:
    """counts: blocks of each of the four stages; (3, 8, 36, 3) is ResNet-152."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def batches(sizes: list[int], image: int, device: str, mark: Mark, what: str) -> Iterator[Tensor]:
    """Images for each step; the next ones are brought on a stream of their own."""
    is_cuda = device.startswith("cuda")
    stream = torch.cuda.Stream() if is_cuda else None

    def bring(size: int) -> Tensor:
        host = torch.rand(size, 3, image, image)
        if stream is None:
            return host
        with torch.cuda.stream(stream):
            return host.to(device, non_blocking=True).sub_(0.5).mul_(4)

    following = bring(sizes[0])
    for index, size in enumerate(sizes):
        now = following
        if is_cuda:
            torch.cuda.current_stream().wait_stream(stream)
            now.record_stream(torch.cuda.current_stream())
        if index + 1 < len(sizes):
            following = bring(sizes[index + 1])
        mark(f"{what} {index}: {size} images")
        yield now


def main() -> None:
    arguments = parser(
        __doc__ or "", epochs=2, steps=3, batch=128, last=51, evaluation=250, image=224, blocks=36
    ).parse_args()
    device = arguments.device
    with running(arguments) as mark:
        with torch.device(device):
            model = resnet((3, 8, arguments.blocks, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(arguments.epochs):
            model.train()
            sizes = [arguments.batch] * arguments.steps + [arguments.last]
            for images in batches(sizes, arguments.image, device, mark, "training"):
                labels = torch.randint(1000, (len(images),), device=device)
                with torch.autocast(device.split(":")[0], torch.bfloat16):
                    loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            model.eval()
            sizes = [arguments.evaluation] * 2
            with torch.no_grad(), torch.autocast(device.split(":")[0], torch.bfloat16):
                for images in batches(sizes, arguments.image, device, mark, "evaluation"):
                    model(images)


if __name__ == "__main__":
    main()
