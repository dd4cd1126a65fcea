"""Weights that are parts of one joined weight, found again by where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..ops.panels import PanelWeight
from ..ops.panels.layout import OUTPUTS


def whole_of(parts: Sequence[PanelWeight], gated: bool = False) -> PanelWeight | None:
    """Return the weight whose parts these are, in this order, over their memory.

    gated: the two parts' panels alternate (`PanelWeight.gated`). None where they do not lie so.
    """
    first = parts[0]
    wanted = _form(first)
    if len(parts) < 2 or (gated and len(parts) != 2):
        return None
    if any(_form(part) != wanted or part.is_gated for part in parts):
        return None
    if gated and parts[0].shape != parts[1].shape:
        return None
    if not gated and any(part.shape[0] % OUTPUTS for part in parts[:-1]):
        return None
    tensors: dict[str, Tensor] = {}
    for name in ("packed", "channel_scales", "group_scales", "zero_points"):
        found = [getattr(part, name) for part in parts]
        if all(tensor is None for tensor in found):
            continue
        whole = _whole_tensor(found, gated)
        if whole is None:
            return None
        tensors["panels" if name == "packed" else name] = whole
    tensors["panels"] = tensors["panels"].flatten()
    if "channel_scales" in tensors:
        tensors["channel_scales"] = tensors["channel_scales"].flatten()
    result = PanelWeight.from_tensors(
        tensors,
        format=first.format,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        group_size=first.group_size,
        dtype=first.dtype,
        gated=gated,
    )
    result.activation_dtype = first.activation_dtype
    return result


def _form(weight: PanelWeight) -> tuple[object, ...]:
    has_zeros = weight.zero_points is not None
    form = weight.format, weight.group_size, weight.dtype, weight.activation_dtype
    return *form, weight.shape[1], has_zeros


def _whole_tensor(parts: Sequence[Tensor | None], gated: bool) -> Tensor | None:
    """Return parts [panels, ...] as one tensor, or None where they do not follow each other."""
    first = parts[0]
    if first is None:
        return None
    panel = first[0].numel() if first.shape[0] else 0
    offset = first.storage_offset()
    for part in parts:
        if part is None or not part[0].is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if part.storage_offset() != offset or part.stride(0) != panel * (2 if gated else 1):
            return None
        offset += panel if gated else part.numel()
    count = sum(part.shape[0] for part in parts if part is not None)
    return first.as_strided((count, *first.shape[1:]), (panel, *first.stride()[1:]))


def joined_groups(
    weights: Iterable[PanelWeight],
) -> list[tuple[PanelWeight, list[PanelWeight]]]:
    """Return (whole, parts in order) for all weights that are parts of a joined one."""
    by_storage: dict[int, list[PanelWeight]] = {}
    for weight in weights:
        pointer = weight.packed.untyped_storage().data_ptr()
        by_storage.setdefault(pointer, []).append(weight)
    groups = []
    for members in by_storage.values():
        left = sorted(members, key=lambda weight: weight.packed.storage_offset())
        while left:
            whole, count = _longest(left)
            if whole is not None:
                groups.append((whole, left[:count]))
            left = left[count:]
    return groups


def _longest(members: list[PanelWeight]) -> tuple[PanelWeight | None, int]:
    """The whole of the first member and as many after it as possible, and how many these are."""
    gated = whole_of(members[:2], True)
    if gated is not None:
        return gated, 2
    best, count = None, 1
    for end in range(2, len(members) + 1):
        found = whole_of(members[:end])
        if found is None:
            break
        best, count = found, end
    return best, count
