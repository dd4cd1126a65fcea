"""From a plain weight to a packed one of 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.packed import PackedTensor
from ..ops._panels import PanelWeight
from ..ops.quantize_weight import quantize_weight
from .calibrated import calibrated_codes
from .configs import WeightConfig


def quantized(
    weight: Tensor, config: WeightConfig, name: str = "weight", moments: Tensor | None = None
) -> PanelWeight:
    """Return a plain weight [out_features, in_features] packed as `config` says.

    The result looks like a tensor of the weight's dtype. name: of the weight, for errors. moments:
    of calibration inputs (see `calibrated_codes`), or None to round to nearest. Raises ValueError
    where the weight holds values that are not finite.
    """
    plain, form = weight.detach(), config.format
    settings = config.group_size, config.symmetric, config.search
    if moments is None:
        codes, scales, zero_points = quantize_weight(plain, form, *settings)
    else:
        codes, scales, zero_points = calibrated_codes(plain, moments, form, *settings)
    if not bool(scales.isfinite().all()):
        raise ValueError(f"quantize: expected finite values in {name}, got NaN or infinity")
    packed = PanelWeight.from_codes(config.format, codes, scales, zero_points, dtype=weight.dtype)
    packed.activation = config.activation
    return packed


class TransposedPanelWeight(PackedTensor):
    """A packed weight that its module keeps as [in_features, out_features] (GPT-2's Conv1D).

    packed: the `PanelWeight`, [out_features, in_features].
    """

    packed: PanelWeight

    def __new__(cls, packed: PanelWeight) -> TransposedPanelWeight:
        like = torch.empty(packed.shape[::-1], dtype=packed.dtype, device="meta")
        result: TransposedPanelWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=packed.device, requires_grad=False
        )
        result.packed = packed
        return result

    def nbytes_packed(self) -> int:
        return self.packed.nbytes_packed()

    def repack(self, values: Tensor) -> None:
        self.packed.repack(values.detach().t())

    def dense(self) -> Tensor:
        return self.packed.dense().t().contiguous()

    def copy(self) -> TransposedPanelWeight:
        return TransposedPanelWeight(self.packed.copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_transposed, (self.packed, self.requires_grad)


def _rebuild_transposed(packed: PanelWeight, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(TransposedPanelWeight(packed), requires_grad)
