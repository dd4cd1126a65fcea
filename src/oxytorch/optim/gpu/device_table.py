"""A table of addresses on a device that follows one on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .devices import StepDevice


class DeviceTable:
    """The table `host` (int64 [n, ...]), on a device.

    Uploads take the order of the stream and wait for nothing. A graph that is captured gets a table
    of its own, which it fills whenever it runs and later uploads leave alone.
    """

    def __init__(self, device: StepDevice, host: Tensor) -> None:
        self.host = host
        self._device = device
        self._table = torch.empty_like(host, device=device.device)
        self._streams = {device.stream()}
        self._is_current = False
        self._staging: Tensor | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []

    @property
    def is_captured(self) -> bool:
        """Whether a graph reads this object's memory, which has to stay then."""
        return bool(self._captured)

    def changed(self) -> None:
        """Notes that `host` was written."""
        self._is_current = False

    def bring(self, stream: int, beside: Sequence[Tensor]) -> Tensor:
        """The table for launches on the stream that follow, with what `host` holds now.

        beside: other memory that they use; it stays, should it be given up, until they are done.
        """
        if self._device.is_capturing():
            return self._bring_into_graph()
        if stream not in self._streams:
            self._streams.add(stream)
            self._device.use_on_stream([self._table, *beside])
        if not self._is_current:
            self._device.upload(self._table, self.host, self._device.staging(self.host))
            self._is_current = True
        if self._staging is None:
            # The host's memory for a graph: while that is captured none can be had.
            self._staging = self._device.staging(self.host)
        return self._table

    def _bring_into_graph(self) -> Tensor:
        if self._staging is None:
            raise RuntimeError(
                "expected a step outside of a graph before each one that is captured, got none: "
                "make one more step, as warm-up, before capturing"
            )
        staging, self._staging = self._staging, None
        table = torch.empty_like(self._table)
        self._device.upload(table, self.host, staging)
        self._captured.append((table, staging))
        return table
