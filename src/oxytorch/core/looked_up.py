"""Weights that look up their values in others, which are stored in another form."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor

from .packed import PackedTensor


class LookUpWeight(PackedTensor):
    """A weight whose values are looked up in one that is stored in another form.

    packed: that one. `_shared_fields` are the arguments of the class, `packed` the first.
    """

    packed: Any

    def _over(self: _LookUp, packed: Any) -> _LookUp:
        """The same look-up in another stored weight."""
        result: _LookUp = type(self)(packed, *[*self.fields().values()][1:])
        return result

    def _deep_copy(self: _LookUp, memo: dict[int, Any]) -> _LookUp:
        self.sync()
        return self._over(deepcopy(self.packed, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        if self._is_handed_out and not is_parameter:
            return super().__reduce_ex__(protocol)
        self.sync()
        return _rebuild, (type(self), (*self.fields().values(),), is_parameter, self.requires_grad)


_LookUp = TypeVar("_LookUp", bound=LookUpWeight)


def _rebuild(
    kind: type[LookUpWeight], fields: tuple[Any, ...], is_parameter: bool, requires_grad: bool
) -> Tensor:
    result = kind(*fields)
    return result.as_parameter(requires_grad) if is_parameter else result


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
