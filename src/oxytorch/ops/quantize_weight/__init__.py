"""Quantizes the weights of a linear layer to 4 or 8 bits, with scales per output or group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._op import Cost, Sample, register
from ..panels.formats import CODES, FORMATS, GROUP_SIZES
from ..panels.rounding import codes_with
from . import reference


def quantize_weight(
    weight: Tensor,
    format: str,
    group_size: int | None = None,
    symmetric: bool = True,
    search: bool = True,
    block_outputs: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (quantized, scales, zero_points) with weight ~ scale (quantized - zero_point).

    weight: [out_features, in_features], float32, bfloat16 or float16.
    format: one that quantizes, see `panels.formats`: "int8" (0 to 255), "int4" (0 to 15), "nf4"
    (indexes of `panels.formats.NF4`) or "fp8" (the bits of E4M3 numbers).
    group_size: neighbouring inputs that share a scale; it divides in_features. None: all.
    quantized: uint8 [out, in]; scales: float32 [out, groups]; zero_points: uint8 [out, groups],
    or None where symmetric (128 for int8, 8 for int4) and for nf4 and fp8.
    block_outputs: for nf4 and fp8, neighbouring outputs that share their scales, the largest of
    these.

    Every range holds zero, which is met exactly. int8: scale = largest magnitude / 127, or range /
    255. nf4: scale = largest magnitude. fp8: scale = largest magnitude / 448, and values round to
    nearest, ties to even. int4: with `search`, the scale among some that cut off
    outliers (symmetric: of either sign, so that all 16 values are used), each improved to the best
    one for its quantized values by least squares, that has the least squared error; without it,
    largest magnitude / 7, or range / 15. Scales of groups have 11 significant bits, so that
    float16 holds them. Computed in float32. The scale of values that are not all finite is NaN.
    Raises ValueError for arguments that do not fit.
    """
    _check(weight, format, group_size, symmetric, block_outputs)
    size = weight.shape[1] if group_size is None else group_size
    codes, scales, zero_points = reference.quantize_weight(weight, format, size, symmetric, search)
    if block_outputs > 1:
        _share_scales(weight, format, codes, scales, block_outputs)
    return codes, scales, None if symmetric or FORMATS[format].middle is None else zero_points


def _share_scales(
    weight: Tensor, format: str, codes: Tensor, scales: Tensor, block_outputs: int
) -> None:
    """Give neighbouring outputs the largest of their scales, and their codes by it, in place."""
    for begin in range(0, len(codes), block_outputs):
        block = slice(begin, begin + block_outputs)
        scales[block] = scales[block].amax(0)
        codes[block] = codes_with(format, weight[block].detach(), scales[block], None)


def _check(
    weight: Tensor, format: str, group_size: int | None, symmetric: bool, block_outputs: int
) -> None:
    name = "quantize_weight"
    if format not in CODES:
        raise ValueError(f"{name}: expected format from {', '.join(CODES)}, got {format!r}")
    if FORMATS[format].middle is None and not symmetric:
        raise ValueError(f"{name}: expected symmetric=True for {format}, got False")
    if block_outputs != 1 and (block_outputs < 1 or FORMATS[format].middle is not None):
        raise ValueError(
            f"{name}: expected block_outputs 1, or for formats without zero points at least 1, got "
            f"{block_outputs}"
        )
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name}: expected weight of shape [out_features, in_features] with floating values, "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(f"{name}: expected group_size from {GROUP_SIZES}, got {group_size!r}")
    if group_size is not None and weight.shape[1] % group_size:
        raise ValueError(
            f"{name}: expected a group_size that divides in_features {weight.shape[1]}, "
            f"got {group_size}"
        )


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory").

    Those for tests hold multiples of a power of two, of which all levels find the same codes.
    """
    if size != "test":
        shape = (256, 512) if size == "cache" else (4096, 8192)
        yield Sample("int4", (torch.randn(shape, device="cpu").to(dtype), "int4", 128, True, True))
        return
    for format in CODES:
        kinds = (True, False) if FORMATS[format].middle is not None else (True,)
        for symmetric in kinds:
            for rows, groups, group_size in ((3, 1, 203), (5, 3, 32), (1, 2, 256), (0, 1, 16)):
                weight = _multiples(format, symmetric, rows, groups, group_size).to(dtype)
                name = f"{format}-{rows}x{groups}x{group_size}" + "-asymmetric" * (not symmetric)
                yield Sample(name, (weight, format, group_size, symmetric, True))
                if format == "int4":
                    yield Sample(name + "-plain", (weight, format, group_size, symmetric, False))


def _multiples(format: str, symmetric: bool, rows: int, groups: int, group_size: int) -> Tensor:
    """Values of codes, among them those that give each group its scale."""
    kind = FORMATS[format]
    if kind.middle is None:
        values = kind.values()
        values = values[values.isfinite()].sort().values
    elif symmetric:
        largest = FORMATS[format].largest_code // 2
        values = torch.arange(-largest, largest + 1.0, device="cpu")
    else:
        values = torch.arange(FORMATS[format].largest_code + 1.0, device="cpu") - 3
    chosen = torch.randint(len(values), (rows, groups, group_size), device="cpu")
    chosen[..., 0], chosen[..., 1] = 0, len(values) - 1
    return (values[chosen] / 64).flatten(1)


def cost(weight: Tensor, group_size: int, search: bool, **rest: object) -> Cost:
    """Reads the weight, writes codes, scales and zero points."""
    groups = weight.numel() // max(group_size, 1)
    operations = (40 if search else 4) * weight.numel()
    return Cost(weight.nbytes + weight.numel() + 5 * groups, operations)


op = register(reference.quantize_weight, samples, cost, has_gradient=False)
