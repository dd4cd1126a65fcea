"""How a GPU's time is measured."""

from __future__ import annotations

import time
from typing import Any

import torch

from oxytorch.benchmark.core.rounds import Call


class Clock:
    """CUDA's events around calls that all wait in the queue when the first begins."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self._cycles_per_second = 1e3 * float(getattr(properties, "clock_rate", 2_000_000))

    def device_name(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.device)

    def synchronize(self) -> None:
        """Waits until the device has done everything."""
        torch.cuda.synchronize(self.device)

    def on_host(self, call: Call) -> float:
        """Seconds until the call returns, on an idle device."""
        self.synchronize()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def on_device(self, call: Call, count: int, host_seconds: float) -> float:
        """Seconds of the device per call, over `count` calls that the host takes that long for."""
        event: Any = torch.cuda.Event
        sleep: Any = torch.cuda._sleep
        first, last = event(enable_timing=True), event(enable_timing=True)
        # The device idles until the host has asked for all steps, so that it never waits between
        # them, as far as the queue holds their kernels.
        wait = min(2.0, 1.5 * count * host_seconds + 1e-3)
        sleep(int(wait * self._cycles_per_second))
        first.record()
        for _ in range(count):
            call()
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count

    def allocated(self) -> int | None:
        """Bytes of the tensors that exist, or None where nobody counts them."""
        return torch.cuda.memory_allocated(self.device)
