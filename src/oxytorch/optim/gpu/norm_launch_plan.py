"""The norm of gradients on a GPU, and the factor that clips them; neither comes to the host."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from ...gpu.kernel import Launch
from ...ops.global_norm import gpu
from ...ops.optimizer_step import layout
from . import address_guard
from .device_table import DeviceTable
from .devices import StepDevice


class CachedNorm:
    """The plan for the gradients of an optimizer's parameters, as long as it holds."""

    def __init__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: StepDevice
    ) -> None:
        """parameters: all of them.
        gradients: of those that have one, on one device.
        """
        self.plan = NormLaunchPlan(gradients, device)
        self._parameters = list(parameters)
        having = [own for own in parameters if own.grad is not None]
        rest = [own for own in parameters if own.grad is None]
        followed = [*(having[place] for place in self.plan.order), *rest]
        self._guard = address_guard.guard([], followed, self.plan.addresses)

    def is_current(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the plan is that for the gradients that there are now, wherever they lie."""
        if len(parameters) != len(self._parameters) or not all(
            map(is_, parameters, self._parameters)
        ):
            return False
        moved = self._guard.compare()
        if moved is address_guard.Moved.GRADIENTS:
            self.plan.table.changed()
        return moved is not address_guard.Moved.OTHER


class NormLaunchPlan:
    """The norm of tensors on one device, to be taken again and again.

    gradients: float32, bfloat16 or float16, dense.
    order: their places, in the order of the table.
    addresses: int64 [tensors, ...] on the host, the first number of a row that of a gradient; tell
        `table` when they were written.
    """

    def __init__(self, gradients: Sequence[Tensor], device: StepDevice) -> None:
        self._device = device
        place = device.device
        formats = [layout.FLOATS[gradient.dtype] for gradient in gradients]
        self.order = sorted(range(len(formats)), key=formats.__getitem__)
        host = torch.zeros(len(gradients), layout.TENSOR_FIELDS, dtype=torch.int64, device="cpu")
        counts = torch.tensor([gradients[i].numel() for i in self.order], device="cpu")
        host[:, layout.GRADIENT] = torch.tensor(
            [gradients[i].data_ptr() for i in self.order], device="cpu"
        )
        host[:, layout.COUNT] = counts
        self.addresses = host[:, layout.GRADIENT :]
        self.table = DeviceTable(device, host)
        kinds = sorted(set(formats))
        self._partials = torch.empty(len(kinds) * gpu.PROGRAMS, dtype=torch.float64, device=place)
        self._blocks: list[Tensor] = []
        self._sums: list[Launch] = []
        begin = 0
        for number, kind in enumerate(kinds):
            end = begin + formats.count(kind)
            blocks = layout.block_table(counts[begin:end])
            blocks[:, 0] += begin
            self._blocks.append(torch.empty_like(blocks, device=place))
            device.upload(self._blocks[-1], blocks, device.staging(blocks))
            partials = self._partials[number * gpu.PROGRAMS :].data_ptr()
            function = device.function(gpu.SQUARES, gpu.squares_signature(kind))
            own = (self._blocks[-1].data_ptr(), len(blocks), partials)
            self._sums.append(function.bind(0, *own))
            begin = end
        function = device.function(gpu.NORM, gpu.NORM_SIGNATURE)
        partials = self._partials.data_ptr()
        self._finish = function.bind(partials, len(self._partials), 0, 1.0, 0, 0)

    def run(self, max_norm: float, gradient_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm, and min(1, max_norm / (norm + 1e-6)); float32 [] on the device.

        gradient_scale: float32 on the device, which the gradients contain and the norm does not.
        """
        stream = self._device.stream()
        table = self.table.bring(stream, [*self._blocks, self._partials]).data_ptr()
        norm, factor = torch.empty(2, device=self._device.device).unbind()
        for launch in self._sums:
            launch.set(0, table)
            launch(gpu.PROGRAMS, stream)
        scale = 0 if gradient_scale is None else gradient_scale.data_ptr()
        for position, value in enumerate((scale, max_norm, norm.data_ptr(), factor.data_ptr()), 2):
            self._finish.set(position, value)
        self._finish(1, stream)
        return norm, factor
