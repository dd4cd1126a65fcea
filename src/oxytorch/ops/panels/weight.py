"""Weights in panels, which still look like plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...core.packed import PackedTensor
from ...core.placement import empty_bytes
from ..pack_panels import pack_panels
from ..quantize_weight import quantize_weight
from ..unpack_panels import unpack_panels
from . import layout
from .checks import check_alike, check_codes, check_matrix, check_plain_format, check_tensors
from .formats import CODES, FORMATS
from .recover import recovered
from .rounding import codes_with

_TENSORS = ("packed", "channel_scales", "group_scales", "zero_points")


class PanelWeight(PackedTensor):
    """A weight [out_features, in_features] in panels (see `layout`), for few rows and for many.

    It has the shape and dtype of the plain weight and its values, which are the dequantized ones
    rounded to that dtype. A write quantizes again: an output with the scales that are there where
    these give the written values exactly, else with others that do (see `recovered`), else with
    new ones, as `quantize_weight` finds them.

    packed: uint8 [panels, bytes of a panel].
    channel_scales: float32 [panels, 16], times group_scales float16 or float32 [panels, groups, 16]
        if there are groups.
    zero_points: uint8 [panels, groups, 16], or None for the middle (128 or 8).
    is_gated: panels alternate between the upper half (gate) and the lower half (up) of the weight.
    activation_dtype: "int8" rounds what is multiplied to 255 steps a row.
    """

    packed: Tensor
    format: str
    group_size: int | None
    is_gated: bool
    activation_dtype: str | None
    channel_scales: Tensor | None
    group_scales: Tensor | None
    zero_points: Tensor | None

    inputs: int
    """in_features."""

    outputs: int
    """Of a product: out_features, or half of them if the weight is gated."""

    place: tuple[PanelWeight, int, int] | None
    """Of a part of a joined weight: that one, and where its outputs begin and end there."""

    _shared_fields = (
        *_TENSORS, "format", "group_size", "is_gated", "activation_dtype", "inputs", "outputs",
        "place",
    )  # fmt: skip

    @property
    def operands(self) -> tuple[str, Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        """The arguments of `linear_panels` that tell of the weight, format to out_features."""
        return (
            self.format,
            self.packed,
            self.channel_scales,
            self.group_scales,
            self.zero_points,
            self.outputs,
        )

    @classmethod
    def from_dense(cls, weight: Tensor, format: str = "bf16") -> PanelWeight:
        """Packs a floating weight [out, in] as bfloat16, or with format "fp32" as float32."""
        check_matrix(weight)
        check_plain_format(format)
        values = weight.detach().to(FORMATS[format].dtype).contiguous()
        panels = pack_panels(values, format)
        return _made({"packed": _placed(panels)}, format, values.shape, values.dtype)

    @classmethod
    def from_codes(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        zero_points: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        exact_scales: bool = False,
    ) -> PanelWeight:
        """Packs codes uint8 [out, in], a code per byte, of a format of `formats.CODES`.

        scales: float32 [out, groups], one per output and group of neighbouring inputs.
        zero_points: uint8 [out, groups], or None: 128, or 8 for int4.
        dtype: that of the plain values. With several groups a scale is kept as float16 times a
            power of two of its output, so that float16 scales stay exact.
        exact_scales: keep them as float32 where that rounds one.
        """
        check_codes(format, codes, scales, zero_points)
        groups = scales.shape[1]
        tensors = {
            "packed": _placed(pack_panels(codes, format)),
            **_scale_tensors(scales.float(), zero_points, False, exact_scales),
        }
        group_size = codes.shape[1] // groups if groups > 1 else None
        return _made(tensors, format, codes.shape, dtype, group_size)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        format: str,
        shape: Sequence[int],
        group_size: int | None,
        dtype: torch.dtype,
        gated: bool = False,
    ) -> PanelWeight:
        """Wraps what `tensors` of another weight returned, without a copy.

        Raises ValueError if a tensor is missing, or its shape or dtype does not fit the rest.
        """
        check_tensors(tensors, format, shape, group_size, gated)
        panels = layout.panels_of(shape[0], gated)
        found = {name: tensors[name] for name in _TENSORS[1:] if name in tensors}
        if "channel_scales" in found:
            found["channel_scales"] = found["channel_scales"].view(panels, layout.OUTPUTS)
        found["packed"] = tensors["panels"].view(panels, -1)
        return _made(found, format, shape, dtype, group_size, gated)

    @classmethod
    def joined(cls, weights: Sequence[PanelWeight]) -> PanelWeight:
        """Returns several weights [out_i, in] one below the other as one; a copy."""
        first = check_alike("joined", weights)
        shape = sum(weight.shape[0] for weight in weights), first.shape[1]
        if all(weight.shape[0] % layout.OUTPUTS == 0 for weight in weights[:-1]):
            tensors = {
                name: _joined([getattr(weight, name) for weight in weights])
                for name in first._present()
            }
            return first._like(tensors, shape)
        if not FORMATS[first.format].has_codes:
            dense = torch.cat([weight.dense() for weight in weights])
            return cls.from_dense(dense, first.format)
        codes, scales, zero_points = zip(*(weight.codes() for weight in weights), strict=True)
        result = cls.from_codes(
            first.format,
            torch.cat(codes),
            torch.cat(scales),
            None if zero_points[0] is None else torch.cat(zero_points),
            dtype=first.dtype,
            exact_scales=True,
        )
        result.activation_dtype = first.activation_dtype
        return result

    @classmethod
    def gated(cls, gate: PanelWeight, up: PanelWeight) -> PanelWeight:
        """Returns gate above up, whose panels alternate, for the epilogues "..._mul"; a copy."""
        first = check_alike("gated", (gate, up))
        if gate.shape != up.shape:
            raise ValueError(
                f"gated: expected up of shape {list(gate.shape)}, got {list(up.shape)}"
            )
        tensors = {
            name: _joined([getattr(gate, name), getattr(up, name)], alternating=True)
            for name in first._present()
        }
        return first._like(tensors, (2 * gate.shape[0], gate.shape[1]), gated=True)

    def part(self, begin: int, end: int) -> PanelWeight:
        """Returns the outputs begin to end as a weight over the same memory.

        begin and end are multiples of 16 (end may be the last output), so that no panel is shared
        with others; or the part is a half of a gated weight.
        """
        if self.is_gated:
            half = self.shape[0] // 2
            if (begin, end) not in ((0, half), (half, 2 * half)):
                raise ValueError(
                    f"part: expected a half of the gated weight's {2 * half} outputs, "
                    f"got {begin} to {end}"
                )
            panels = slice(begin // half, None, 2)
        else:
            shares_panels = begin % layout.OUTPUTS or (
                end % layout.OUTPUTS and end != self.shape[0]
            )
            if shares_panels or not 0 <= begin < end <= self.shape[0]:
                raise ValueError(
                    f"part: expected outputs in [0, {self.shape[0]}) that begin and end at a "
                    f"multiple of {layout.OUTPUTS}, got {begin} to {end}"
                )
            panels = slice(begin // layout.OUTPUTS, -(-end // layout.OUTPUTS))
        tensors = {name: getattr(self, name)[panels] for name in self._present()}
        result = self._like(tensors, (end - begin, self.shape[1]))
        result.place = self, begin, end
        self.relate(result)
        return result

    def codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns codes uint8 [out, in], scales float32 [out, groups] and zero points or None."""
        if not FORMATS[self.format].has_codes:
            raise ValueError(
                f"codes: expected a weight of {', '.join(CODES)}, got {self.format}; use dense()"
            )
        self.sync()
        return self._codes()

    def _codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.channel_scales is not None
        scales = layout.joined_scales(self.channel_scales.flatten(), self.group_scales)
        zero_points = self.zero_points
        if zero_points is not None:
            zero_points = self._by_output(zero_points.transpose(1, 2))
        return self._unpacked(), self._by_output(scales), zero_points

    def tensors(self) -> dict[str, Tensor]:
        """Returns what is stored on disk: "panels" uint8 [bytes], "channel_scales" and so on."""
        self.sync()
        found = {name: getattr(self, name).contiguous() for name in self._present()}
        found = {"panels": found.pop("packed").flatten(), **found}
        if "channel_scales" in found:
            found["channel_scales"] = found["channel_scales"].flatten()
        return found

    def nbytes_packed(self) -> int:
        """Bytes of panels, scales and zero points."""
        return sum(getattr(self, name).nbytes for name in self._present())

    def restore(self) -> Tensor:
        """Returns the plain values, a new contiguous tensor of this shape and dtype."""
        if not FORMATS[self.format].has_codes:
            return self._unpacked()
        return layout.values_of(self.format, *self._codes()).to(self.dtype)

    def repack(self, values: Tensor) -> None:
        """Replaces the stored values by `values`, a plain floating tensor of this shape."""
        values = values.detach()
        if not FORMATS[self.format].has_codes:
            self._write(values.to(FORMATS[self.format].dtype).contiguous())
            return
        values = values.to(self.dtype)
        if torch.equal(self.restore(), values):
            return
        _, scales, zero_points = self._codes()
        codes = codes_with(self.format, values, scales, zero_points)
        kept = layout.values_of(self.format, codes, scales, zero_points).to(self.dtype)
        # NaN stays NaN in a format that has it.
        rows = ((kept != values) & ~(kept.isnan() & values.isnan())).any(1)
        if rows.any():
            exactly = self.group_scales is not None and self.group_scales.dtype == torch.float32
            own_codes, own_scales, own_zero_points = self._quantized(values[rows], exactly)
            codes[rows], scales[rows] = own_codes, own_scales
            if zero_points is not None and own_zero_points is not None:
                zero_points[rows] = own_zero_points
            tensors = _scale_tensors(scales, zero_points, self.is_gated, exactly)
            for name, tensor in tensors.items():
                getattr(self, name).copy_(tensor)
        self._write(codes)

    def _quantized(self, values: Tensor, exactly: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """New codes, scales and zero points; those that give the values exactly, where any do."""
        symmetric = self.zero_points is None
        codes, scales, zero_points = quantize_weight(
            values, self.format, self.group_size, symmetric
        )
        size = self.group_size or values.shape[1]
        is_float16 = self.group_scales is not None and not exactly
        own_codes, own_scales, own_zero_points, found = recovered(
            self.format, values, size, symmetric, is_float16
        )
        grouped = torch.unflatten(codes, 1, (-1, size))
        grouped[found] = torch.unflatten(own_codes, 1, (-1, size))[found]
        scales[found] = own_scales[found]
        if zero_points is not None:
            zero_points[found] = own_zero_points[found]
        return codes, scales, zero_points

    def why_not_packed(self) -> str | None:
        """Returns why values of this shape and dtype cannot be packed, or None if they can."""
        kind = FORMATS[self.format]
        if not kind.has_codes and self.dtype != kind.dtype:
            return f"its values are {str(self.dtype).removeprefix('torch.')} now"
        if self.dim() != 2 or self.packed.shape[0] != layout.panels_of(
            self.shape[0], self.is_gated
        ):
            return f"its shape is {list(self.shape)} now"
        if self.packed.shape[1] != layout.panel_bytes(self.format, self.shape[1]):
            return f"its shape is {list(self.shape)} now"
        return None

    def copy(self) -> PanelWeight:
        """Returns a weight with stored values of its own."""
        self.sync()
        tensors = {name: getattr(self, name).clone() for name in self._present()}
        tensors["packed"] = _placed(self.packed)
        return self._like(tensors, self.shape, self.is_gated)

    def _deep_copy(self, memo: dict[int, Any]) -> PanelWeight:
        if self.place is None:
            return self.copy()
        self.sync()
        whole, begin, end = self.place
        part: PanelWeight = deepcopy(whole, memo).part(begin, end)
        return part

    def _present(self) -> list[str]:
        return [name for name in _TENSORS if getattr(self, name) is not None]

    def _like(
        self, tensors: Mapping[str, Tensor], shape: Sequence[int], gated: bool = False
    ) -> PanelWeight:
        result = _made(tensors, self.format, shape, self.dtype, self.group_size, gated)
        result.activation_dtype = self.activation_dtype
        return result

    def _by_output(self, values: Tensor) -> Tensor:
        return layout.by_output(values, self.shape[0], self.is_gated).contiguous()

    def _unpacked(self) -> Tensor:
        return unpack_panels(self.packed, self.format, self.shape[0], self.shape[1], self.is_gated)

    def _write(self, values: Tensor) -> None:
        # In place: the other objects over the same memory (a part, the whole) see it too.
        self.packed.copy_(pack_panels(values, self.format, self.is_gated))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        if self._is_handed_out and not is_parameter:
            return super().__reduce_ex__(protocol)
        if self.place is not None:
            self.sync()
            return _rebuild_part, (*self.place, is_parameter, self.requires_grad)
        fields = self.format, tuple(self.shape), self.group_size, self.dtype, self.is_gated
        return _rebuild, (
            self.tensors(),
            *fields,
            self.activation_dtype,
            is_parameter,
            self.requires_grad,
        )


def _made(
    tensors: Mapping[str, Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int | None = None,
    gated: bool = False,
) -> PanelWeight:
    device = tensors["packed"].device
    result = PackedTensor._wrap(PanelWeight, shape, dtype, device)
    for name in _TENSORS:
        setattr(result, name, tensors.get(name))
    result.format, result.group_size = format, group_size
    result.is_gated, result.activation_dtype = gated, None
    result.place = None
    # Not asked of the shape in each call: torch would make a new tuple.
    result.inputs = shape[1]
    result.outputs = shape[0] // 2 if gated else shape[0]
    return result


def _rebuild(
    tensors: dict[str, Tensor],
    format: str,
    shape: tuple[int, int],
    group_size: int | None,
    dtype: torch.dtype,
    gated: bool,
    activation_dtype: str | None,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    result = PanelWeight.from_tensors(
        tensors, format=format, shape=shape, group_size=group_size, dtype=dtype, gated=gated
    )
    result.activation_dtype = activation_dtype
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result


def _rebuild_part(
    whole: PanelWeight, begin: int, end: int, is_parameter: bool, requires_grad: bool
) -> Tensor:
    result = whole.part(begin, end)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result


def _scale_tensors(
    scales: Tensor, zero_points: Tensor | None, gated: bool, exactly: bool = False
) -> dict[str, Tensor]:
    """Scales float32 and zero points [out, groups] in the order of the panels."""
    found = {}
    if scales.shape[1] == 1:
        found["channel_scales"] = layout.by_panel(scales[:, 0], gated).contiguous()
    else:
        powers, halves = layout.split_scales(scales, exactly)
        found["channel_scales"] = layout.by_panel(powers, gated).contiguous()
        found["group_scales"] = layout.by_panel(halves, gated).transpose(1, 2).contiguous()
    if zero_points is not None:
        found["zero_points"] = layout.by_panel(zero_points, gated).transpose(1, 2).contiguous()
    return found


def _placed(panels: Tensor) -> Tensor:
    return _joined([panels])


def _joined(parts: Sequence[Tensor], alternating: bool = False) -> Tensor:
    """Parts [panels, ...] one after the other, or in turns; panels are placed for streaming."""
    shape = [sum(part.shape[0] for part in parts), *parts[0].shape[1:]]
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    if dtype == torch.uint8 and parts[0].dim() == 2:
        result = empty_bytes(shape[0] * shape[1]).view(shape)
    else:
        result = torch.empty(shape, dtype=dtype, device="cpu")
    begin = 0
    for index, part in enumerate(parts):
        if alternating:
            result[index :: len(parts)].copy_(part)
        else:
            result[begin : begin + part.shape[0]].copy_(part)
        begin += part.shape[0]
    return result
