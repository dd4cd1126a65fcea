"""Configurations of `quantize_`: the format of weights, its groups, and the activations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import nn

from ..ops.panels.formats import FORMATS, GROUP_SIZES


@dataclass(frozen=True)
class WeightConfig:
    """The base of all configurations. Use one of its subclasses.

    group_size: consecutive inputs that share a scale: 32, 64, 128 or 256; None is one scale for
        each output. It has to divide the in_features of every quantized layer.
    symmetric: quantized values are centred on zero. False gives each scale a zero point.
    search: choose the int4 scale with the least squared error instead of that of the largest
        magnitude (see `ops.quantize_weight`).

    Raises TypeError or ValueError for other values, and for NF4 and E4M3 with symmetric=False.
    """

    group_size: int | None = None
    symmetric: bool = True
    search: bool = True

    format: ClassVar[str]
    """The format of the quantized values: "int8", "int4", "nf4" or "fp8"."""

    activation_dtype: ClassVar[str | None] = None
    """"int8" if activations are rounded to 8 bits, row by row."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return FORMATS[self.format].bits

    @property
    def block_outputs(self) -> int:
        """Outputs that share their scales."""
        return 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not hasattr(self, "format"):
            raise NotImplementedError(f"{name} does not say its format")
        size = self.group_size
        if size is not None and (isinstance(size, bool) or size not in GROUP_SIZES):
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"{name}: expected group_size {sizes} or None, got {size!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{name}: expected {field.name} True or False, got {value!r}")
        if FORMATS[self.format].middle is None and not self.symmetric:
            raise ValueError(f"{name}: expected symmetric=True, got False")

    def takes(self, module: nn.Module) -> bool:
        """Whether a recurrent layer or an embedding is quantized; linear layers always are."""
        return False

    def check_groups(
        self, caller: str, name: str, in_features: int, otherwise: str, also: str = ""
    ) -> None:
        """Raise ValueError where groups do not divide the in_features of the layer `name`.

        otherwise: the remedy where no group_size fits.
        also: a remedy beside it.
        """
        if self.group_size is None or in_features % self.group_size == 0:
            return
        fitting = [size for size in GROUP_SIZES if in_features % size == 0]
        advice = f"{self._setting_of(fitting[-1])} fits" if fitting else f"use {otherwise}"
        raise ValueError(
            f"{caller}: expected a group_size that divides in_features {in_features} of {name}, "
            f"got {self.group_size}; {advice}{also}"
        )

    def _setting_of(self, size: int) -> str:
        """The argument that gives groups of so many inputs."""
        return f"group_size={size}"

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a packed weight: panels of 16 outputs, inputs in steps of 64."""
        outputs, inputs = -(-out_features // 16) * 16, -(-in_features // 64) * 64
        groups = 0 if self.group_size is None else -(-inputs // self.group_size)
        per_group = 2 + (0 if self.symmetric else 1)
        return outputs * (inputs * self.bits // 8 + 4 + groups * per_group)


@dataclass(frozen=True)
class Int8Weight(WeightConfig):
    """Weights of 8 bits; activations unchanged. Linear layers and embedding bags.

    only_faster: embedding bags, and recurrent layers of `Int8DynamicActivationInt8Weight`, are
        quantized if they are faster here than the floating-point layers of `optimize`, by timing.
        False quantizes all of them, to save memory.
    embeddings: quantize nn.Embedding too, to save memory; looking up rows gets no faster.

    Groups and zero points are for linear layers: with these no other layers are quantized.
    """

    only_faster: bool = True
    embeddings: bool = False

    format = "int8"

    def takes(self, module: nn.Module) -> bool:
        """Whether a recurrent layer or an embedding is quantized; linear layers always are."""
        return type(module) is nn.EmbeddingBag or (type(module) is nn.Embedding and self.embeddings)


@dataclass(frozen=True)
class Int4Weight(WeightConfig):
    """Weights of 4 bits; activations unchanged."""

    group_size: int | None = 128

    format = "int4"


@dataclass(frozen=True)
class NF4Weight(WeightConfig):
    """Weights of 4 bits at quantiles of the normal distribution; activations unchanged.

    Source: Dettmers et al., QLoRA, 2023.
    """

    group_size: int | None = 64

    format = "nf4"


@dataclass(frozen=True)
class Float8Weight(WeightConfig):
    """Weights of 8 bits, which are floating-point numbers (E4M3); activations unchanged.

    block_size: (outputs, inputs) of the blocks that share a scale, as (128, 128) in DeepSeek's
        checkpoints; its inputs are group_size then. None: group_size inputs of one output.

    Source: Open Compute Project, OCP 8-bit Floating Point Specification (OFP8), 2023.
    """

    block_size: tuple[int, int] | None = None

    format = "fp8"

    @property
    def block_outputs(self) -> int:
        """Outputs that share their scales."""
        return 1 if self.block_size is None else self.block_size[0]

    def _setting_of(self, size: int) -> str:
        if self.block_size is None:
            return super()._setting_of(size)
        return f"block_size=({self.block_outputs}, {size})"

    def __post_init__(self) -> None:
        if self.block_size is not None:
            self._take_block()
        super().__post_init__()

    def _take_block(self) -> None:
        size: object = self.block_size
        fits = isinstance(size, (tuple, list)) and [type(n) for n in size] == [int, int]
        if not fits or size[0] < 1 or size[1] not in GROUP_SIZES:  # type: ignore[index]
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(
                "Float8Weight: expected block_size of outputs, at least 1, and inputs, one of "
                f"{sizes}, got {size!r}"
            )
        assert self.block_size is not None
        if self.group_size not in (None, self.block_size[1]):
            raise ValueError(
                f"Float8Weight: expected group_size None or {self.block_size[1]}, the inputs of a "
                f"block, got {self.group_size!r}"
            )
        object.__setattr__(self, "block_size", tuple(self.block_size))
        object.__setattr__(self, "group_size", self.block_size[1])


@dataclass(frozen=True)
class Int8DynamicActivationInt8Weight(Int8Weight):
    """Weights of 8 bits; activations are rounded to 8 bits, row by row. Also LSTM and GRU layers.

    The fields are those of `Int8Weight`.
    """

    activation_dtype = "int8"

    def takes(self, module: nn.Module) -> bool:
        """Whether a recurrent layer or an embedding is quantized; linear layers always are."""
        return type(module) in (nn.LSTM, nn.GRU) or super().takes(module)


@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(Int4Weight):
    """Weights of 4 bits; activations are rounded to 8 bits, row by row."""

    activation_dtype = "int8"


CONFIGS: dict[tuple[str, str | None], type[WeightConfig]] = {
    (kind().format, kind().activation_dtype): kind
    for kind in (
        Int8Weight,
        Int4Weight,
        NF4Weight,
        Float8Weight,
        Int8DynamicActivationInt8Weight,
        Int8DynamicActivationInt4Weight,
    )
}
"""The configurations by the format of the weights and the dtype that activations are rounded to."""
