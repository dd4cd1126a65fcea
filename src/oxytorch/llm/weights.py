"""Parameters that look up their values in weights that are stored in another form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.looked_up import LookUpWeight
from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight


def stored_form(parameter: Tensor) -> Tensor:
    """What a weight looks its values up in, or itself; of the experts' weights the first."""
    stored: Any = parameter
    while isinstance(stored, LookUpWeight):
        stored = stored.packed[0] if isinstance(stored, StackedWeight) else stored.packed
    found: Tensor = stored
    return found


def rounded_activations(parameters: Iterable[Tensor]) -> str | None:
    """What the first of some weights that rounds its activations rounds them to, or None."""
    panels = [form for each in parameters if isinstance(form := stored_form(each), PanelWeight)]
    return next((form.activation_dtype for form in panels if form.activation_dtype), None)


class StackedWeight(LookUpWeight):
    """The weights of all experts as one tensor [experts, out, in].

    packed: a weight for each expert.
    """

    packed: list[PanelWeight]

    _shared_fields = ("packed",)

    def __new__(cls, packed: list[PanelWeight]) -> StackedWeight:
        shape = (len(packed), *packed[0].shape)
        result = PackedTensor._wrap(cls, shape, packed[0].dtype)
        result.packed = packed
        return result

    def nbytes_packed(self) -> int:
        return sum(weight.nbytes_packed() for weight in self.packed)

    def restore(self) -> Tensor:
        return torch.stack([weight.dense() for weight in self.packed])

    def repack(self, values: Tensor) -> None:
        for weight, own in zip(self.packed, values.detach(), strict=True):
            weight.repack(own)

    def copy(self) -> StackedWeight:
        self.sync()
        return self._over([weight.copy() for weight in self.packed])
