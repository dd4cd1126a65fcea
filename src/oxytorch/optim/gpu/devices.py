"""What a step asks of the device that its tensors are on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...gpu.kernel import Function, Kernel, Signature

_log = logging.getLogger("oxytorch.optim")


class StepDevice(Protocol):
    """A device with kernels."""

    device: torch.device

    def function(self, kernel: Kernel, signature: Signature) -> Function:
        """The kernel, loaded; raises NoKernelError where there is no way to have it."""

    def stream(self) -> int:
        """Where work that is given to torch now would run."""

    def is_capturing(self) -> bool:
        """Whether a graph records what is given to the device."""

    def staging(self, like: Tensor) -> Tensor:
        """Memory of the host, as large as `like`, from which uploads do not wait."""

    def upload(self, target: Tensor, source: Tensor, staging: Tensor) -> None:
        """Copies a table of the host, through `staging`, in the order of the stream.

        Returns at once; `source` may be written again, `staging` may not unless it is given up.
        """

    def use_on_stream(self, tensors: Sequence[Tensor]) -> None:
        """Keeps the memory of `tensors`, if they are given up, until the stream has come so far."""


class Accelerator:
    """An accelerator of torch: CUDA, ROCm, or XPU."""

    def __init__(self, device: torch.device) -> None:
        # Programs that stay on the processor need not import it.
        from ...gpu import launch

        self.device = device
        self._launch = launch
        self.has_kernels = launch.forced_way() != "off"
        self._module = torch.get_device_module(device)
        self._is_capturing = getattr(self._module, "is_current_stream_capturing", None)

    def function(self, kernel: Kernel, signature: Signature) -> Function:
        return self._launch.function(kernel, signature, self.device)

    def stream(self) -> int:
        return self._launch.current_stream(self.device)

    def is_capturing(self) -> bool:
        return self._is_capturing is not None and bool(self._is_capturing())

    def staging(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def upload(self, target: Tensor, source: Tensor, staging: Tensor) -> None:
        staging.copy_(source)
        target.copy_(staging, non_blocking=True)

    def use_on_stream(self, tensors: Sequence[Tensor]) -> None:
        stream = self._module.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)


_known: dict[torch.device, StepDevice | None] = {torch.device("cpu"): None}


def find(device: torch.device) -> StepDevice | None:
    """The device, if steps run on it by kernels of its own."""
    if device not in _known:
        found = Accelerator(device) if device.type in ("cuda", "xpu") else None
        _known[device] = found if found is not None and found.has_kernels else None
    return _known[device]


def give_up(device: torch.device, reason: str) -> None:
    """Steps on the device go through plain PyTorch from now on."""
    _log.warning("optimizers on %s run in plain PyTorch: %s", device, reason)
    _known[device] = None
