"""SYCL's CPU device as the device of steps on CPU tensors.

As a plugin of pytest it takes the place of Triton's interpreter in test_gpu.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from cpu_device import CpuDevice

from oxytorch.gpu.kernel import Kernel, Signature


class _Waiting:
    """A launch that returns when its programs have ended: torch's tensors here know no queue."""

    def __init__(self, device: SyclDevice, launch: Any) -> None:
        self._device, self._launch = device, launch
        self.set = launch.set

    def __call__(self, programs: int, stream: int) -> None:
        self._launch(programs, stream)
        self._device.driver.wait()
        self._device.launches += 1


class _Function:
    def __init__(self, device: SyclDevice, function: Any) -> None:
        self._device, self._function = device, function

    def bind(self, *arguments: float) -> _Waiting:
        return _Waiting(self._device, self._function.bind(*arguments))


class SyclDevice(CpuDevice):
    """SYCL's CPU device, as `devices.Accelerator` is an Intel GPU.

    launches: how many so far.
    """

    STREAM = 0

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self.driver = driver
        self.launches = 0
        self._functions: dict[tuple[str, str], _Function] = {}

    def function(self, kernel: Kernel, signature: Signature) -> Any:
        name = kernel.name, signature.name
        if name not in self._functions:
            self._functions[name] = _Function(self, self.driver.build(kernel, signature)[0])
        return self._functions[name]


def pytest_configure(config: Any) -> None:
    """Makes test_gpu.py run on SYCL's CPU device."""
    sys.path.insert(0, str(Path(__file__).parent))
    import gpu_device

    from oxytorch.gpu import sycl
    from oxytorch.optim.gpu import devices

    def install() -> SyclDevice:
        device = SyclDevice(sycl.driver(torch.device("cpu")))
        devices._known[torch.device("cpu")] = device
        return device

    gpu_device.install = install
