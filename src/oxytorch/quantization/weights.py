"""From a plain weight to a packed one of 4 or 8 bits."""

from __future__ import annotations

from torch import Tensor

from ..core.looked_up import LookUpWeight
from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight
from ..ops.quantize_weight import quantize_weight
from ..rewriting.refusals import check_finite
from .calibrated import calibrated_codes
from .configs import WeightConfig


def quantized(
    weight: Tensor, config: WeightConfig, name: str = "weight", moments: Tensor | None = None
) -> PanelWeight:
    """Return a plain weight [out_features, in_features] packed as `config` says.

    The result looks like a tensor of the weight's dtype.

    name: of the weight, for errors.
    moments: of calibration inputs (see `calibrated_codes`), or None to round to nearest.

    Raises ValueError where the weight holds values that are not finite.
    """
    plain, form = weight.detach(), config.format
    codes, scales, zero_points = quantize_weight(
        plain, form, config.group_size, config.symmetric, config.search, config.block_outputs
    )
    check_finite("quantize", name, scales)
    if moments is not None:
        codes = calibrated_codes(plain, moments, form, scales, zero_points)
    packed = PanelWeight.from_codes(form, codes, scales, zero_points, dtype=weight.dtype)
    packed.activation_dtype = config.activation_dtype
    return packed


def activation_dtype(weight: object) -> str | None:
    """To what the inputs of a weight's products are rounded: "int8", or None."""
    while isinstance(weight, LookUpWeight):
        weight = weight.packed
    return weight.activation_dtype if isinstance(weight, PanelWeight) else None


class ReorderedPanelWeight(LookUpWeight):
    """A packed weight whose plain form has another order of dimensions or of inputs.

    packed: the `PanelWeight` [out_features, in_features] that is multiplied.
    transposed: the plain weight is [in_features, out_features] (GPT-2's Conv1D).
    order: int64 [in_features], or None: column i of the packed weight belongs to input order[i]
        (GPTQ's act-order, where inputs of one importance form a group).
    """

    packed: PanelWeight
    transposed: bool
    order: Tensor | None

    _shared_fields = ("packed", "transposed", "order")

    def __new__(
        cls, packed: PanelWeight, transposed: bool = False, order: Tensor | None = None
    ) -> ReorderedPanelWeight:
        shape = packed.shape[::-1] if transposed else packed.shape
        result = PackedTensor._wrap(cls, shape, packed.dtype, packed.device)
        result.packed, result.transposed, result.order = packed, transposed, order
        return result

    @staticmethod
    def around(packed: PanelWeight, transposed: bool, order: Tensor | None) -> PackedTensor:
        """Return a packed weight with such a plain form: `packed` itself where that is its own."""
        if order is None and not transposed:
            return packed
        return ReorderedPanelWeight(packed, transposed, order)

    def nbytes_packed(self) -> int:
        """Bytes of the packed weight and of the order."""
        return self.packed.nbytes_packed() + (0 if self.order is None else self.order.nbytes)

    def repack(self, values: Tensor) -> None:
        """Replace the stored values by `values`, a plain floating tensor of this shape."""
        plain = values.detach().t() if self.transposed else values.detach()
        self.packed.repack(plain if self.order is None else plain[:, self.order])

    def restore(self) -> Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        values = self.packed.dense()
        if self.order is not None:
            values = values[:, self.order.argsort()]
        return (values.t() if self.transposed else values).contiguous()

    def copy(self) -> ReorderedPanelWeight:
        """Return a weight with stored values of its own."""
        self.sync()
        return self._over(self.packed.copy())
