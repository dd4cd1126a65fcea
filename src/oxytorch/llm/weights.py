"""Parameters that look up their values in weights that are stored in another form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight
from ..quantization.weights import LookUpWeight


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


class RowsWeight(LookUpWeight):
    """Some rows of a weight that is stored in another order.

    packed: the weight [out, in] as it is stored, packed or plain.
    places: where each row of this one lies.
    transposed: whether this one is [in, out].
    order: int64 [in], or None: column i of the stored weight is column order[i] of this one.
    """

    packed: Tensor
    places: Tensor
    transposed: bool
    order: Tensor | None

    _shared_fields = ("packed", "places", "transposed", "order")

    def __new__(
        cls,
        packed: Tensor,
        places: Tensor,
        transposed: bool = False,
        order: Tensor | None = None,
    ) -> RowsWeight:
        shape = (len(places), packed.shape[1])
        result = PackedTensor._wrap(cls, shape[::-1] if transposed else shape, packed.dtype)
        result.packed, result.places = packed, places
        result.transposed, result.order = transposed, order
        return result

    def nbytes_packed(self) -> int:
        packed = self.packed
        return packed.nbytes_packed() if isinstance(packed, PackedTensor) else packed.nbytes

    def restore(self) -> Tensor:
        packed = self.packed
        values = packed.dense() if isinstance(packed, PackedTensor) else packed
        values = values[self.places]
        if self.order is not None:
            values = values[:, self.order.argsort()]
        return values.t().contiguous() if self.transposed else values

    def repack(self, values: Tensor) -> None:
        packed = self.packed
        values = values.detach().to(self.dtype)
        values = values.t() if self.transposed else values
        values = values if self.order is None else values[:, self.order]
        if not isinstance(packed, PackedTensor):
            packed[self.places] = values
            return
        whole = packed.dense()
        whole[self.places] = values
        packed.repack(whole)

    def copy(self) -> RowsWeight:
        self.sync()
        packed = self.packed
        own = packed.copy() if isinstance(packed, PackedTensor) else packed.clone()
        return self._over(own)


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
