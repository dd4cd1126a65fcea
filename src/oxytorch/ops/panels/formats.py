"""The formats of weights in panels: what the codes of each mean, in one list.

A new format is a line of `FORMATS`: `quantize_weight`, packing, the references and the kernels of
every level read this list. Kernels know four kinds of codes, of which a format is one: integers of
8 bits, integers of at most 4 bits, indexes of a table of at most 16 values, and the bits of
floating-point numbers of 8 bits. Formats without codes are those of `PLAIN`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightFormat:
    """How values are stored.

    bits: of a value.
    middle: the zero point of symmetric codes, which are integers; None where there are no zero
        points.
    table: the values of the codes in rising order, times a scale.
    floats: the dtype of 8 bits whose numbers the codes are, times a scale.
    searches: whether the scale is sought that errs least.
    """

    name: str
    bits: int
    middle: int | None = None
    table: tuple[float, ...] | None = None
    floats: torch.dtype | None = None
    searches: bool = False

    @property
    def has_codes(self) -> bool:
        """Whether values are codes with scales, and not floating-point numbers."""
        return self.bits < 16

    @property
    def stored_bits(self) -> int:
        """Bits of a value in a panel."""
        return next(bits for bits in (4, 8, 16, 32) if self.bits <= bits)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are packed: values, or a code each."""
        return torch.uint8 if self.has_codes else PLAIN[self.name]

    @property
    def largest_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def largest_value(self) -> float:
        """Of the codes of a table or of floats, times a scale."""
        if self.floats is not None:
            return torch.finfo(self.floats).max
        assert self.table is not None
        return self.table[-1]

    def rounding_error(self, group_size: int) -> float:
        """The error of a product with rounded factors of normal distribution, relative to it.

        Integers and tables have steps of the same size between the largest magnitudes of a group;
        half of all groups have one below that which is taken here. The error of a step is uniform.
        """
        if self.floats is not None:
            return float(torch.finfo(self.floats).eps) / 24**0.5
        largest = 2**0.5 * float(
            torch.erfinv(torch.tensor(0.5 ** (1 / group_size), dtype=torch.float64, device="cpu"))
        )
        return 2 * largest / self.largest_code / 12**0.5

    def values(self, device: torch.device | None = None) -> Tensor:
        """The values of all codes, float32: beyond a table its last value, as in C++."""
        if self.floats is not None:
            codes = torch.arange(self.largest_code + 1, dtype=torch.uint8, device="cpu")
            return codes.view(self.floats).float().to(device or torch.get_default_device())
        assert self.table is not None
        beyond = self.largest_code + 1 - len(self.table)
        return torch.tensor([*self.table, *[self.table[-1]] * beyond], device=device)

    def units(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes in a dtype, before zero points and scales."""
        if self.middle is not None:
            return codes.to(dtype)
        if self.floats is not None and codes.device.type == "cpu":
            return codes.view(self.floats).to(dtype)
        return self.values(codes.device).to(dtype)[codes.long()]

    def nearest(self, units: Tensor) -> Tensor:
        """The codes whose values are nearest, int64; for formats with a table or floats.

        Floats round to even where two are as near; beyond the largest they are the largest.
        """
        if self.floats is not None:
            within = units.clamp(-self.largest_value, self.largest_value)
            return within.to(self.floats).view(torch.uint8).long()
        table = self.values(units.device)
        return torch.bucketize(units, (table[1:] + table[:-1]) / 2)


NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the codes of nf4.

Source: Dettmers et al., QLoRA, 2023, appendix E.
"""

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes of formats whose values are floating-point numbers."""
PLAIN_NAMES = {dtype: name for name, dtype in PLAIN.items()}

FORMATS = {
    format.name: format
    for format in (
        WeightFormat("bf16", 16),
        WeightFormat("int8", 8, middle=128),
        WeightFormat("int4", 4, middle=8, searches=True),
        WeightFormat("nf4", 4, table=NF4),
        WeightFormat("fp8", 8, floats=torch.float8_e4m3fn),
        WeightFormat("fp32", 32),
    )
}
"""By name. C++ reads this list in a header that `tools/write_panel_tables.py` writes."""

GROUP_SIZES = (32, 64, 128, 256)
"""in_features that may share a scale, in C++ too."""

CODES = tuple(name for name, format in FORMATS.items() if format.has_codes)
"""The names of those with codes and scales."""
