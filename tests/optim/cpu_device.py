"""What the devices have in common that stand in for a GPU on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CpuDevice:
    """All that a plan asks of a device but its functions.

    capturing: makes the device say that it captures a graph. uploads: how many there were.
    """

    STREAM: int
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.capturing = False
        self.uploads = 0

    def stream(self) -> int:
        return self.STREAM

    def is_capturing(self) -> bool:
        return self.capturing

    def staging(self, like: Tensor) -> Tensor:
        assert not self.capturing
        return torch.empty_like(like)

    def upload(self, target: Tensor, source: Tensor, staging: Tensor) -> None:
        self.uploads += 1
        target.copy_(staging.copy_(source))

    def use_on_stream(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("there is one stream")
