"""What readers of checkpoints share: checked tensors, codes of words and floats, column orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...core.tensor_file import TensorFiles
from ...ops.panels.formats import FORMATS
from ...ops.panels.layout import GROUP_SIZES
from ...rewriting.refusals import check_finite

FLOAT8 = torch.float8_e4m3fn
"""The dtype of weights whose format is "fp8"."""

_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)


@dataclass
class Codes:
    """One weight as `PanelWeight.from_codes` takes it.

    order: int64 [in_features], or None: column i of the codes belongs to input order[i].
    activation_dtype: "int8" if activations are quantized when they are multiplied.
    """

    format: str
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    order: Tensor | None = None
    activation_dtype: str | None = None


class Scheme:
    """Reads the weights of one `quantization_config`.

    suffixes: names of the tensors that stand for a weight, after the module's path; the first tells
        that a module is quantized.
    ignored: ends of names of tensors that are not needed.
    """

    suffixes: Sequence[str] = ()
    ignored: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def holds(self, files: TensorFiles, path: str) -> bool:
        """Whether the module at `path` has a quantized weight."""
        return f"{path}.{self.suffixes[0]}" in files

    def read(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> Codes:
        """Return the weight [out_features, in_features] of the module at `path`.

        Raises CheckpointError that names the tensor which is missing or does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to read weights")

    def one_of(self, setting: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Return a setting of quantization_config, or `default` where it is not set."""
        given = self.config.get(setting, default)
        if given not in choices:
            raise self.refuse(setting, " or ".join(map(repr, choices)), given)
        return given

    def refuse(self, setting: str, wanted: str, given: object) -> CheckpointError:
        """An error about a setting of quantization_config."""
        return CheckpointError(
            f"{self.source}: expected quantization_config.{setting} {wanted}, got {given!r}"
        )


def take(
    files: TensorFiles, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]
) -> Tensor:
    """Return a tensor of a checkpoint after comparing its dtype and shape."""
    if name not in files:
        raise CheckpointError(f"checkpoint: expected a tensor {name!r}, found none")
    place = files.place(name)
    if place.dtype not in dtypes or tuple(shape) != place.shape:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        given = str(place.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{files.path(name)}: expected tensor {name!r} to be {wanted} {list(shape)}, got "
            f"{given} {list(place.shape)}"
        )
    return files[name]


def take_scales(files: TensorFiles, name: str, shape: Sequence[int]) -> Tensor:
    """Return scales in float32 after looking that all are finite."""
    scales = take(files, name, _SCALES, shape).float()
    check_finite(str(files.path(name)), f"tensor {name!r}", scales, CheckpointError)
    return scales


def fields_of(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned fields of 32-bit words, lowest bits first: uint8 [..., 32 / bits]."""
    parts = words.contiguous().view(torch.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return parts
    return torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def holds_float8(files: TensorFiles, path: str) -> bool:
    """Whether the weight of the module at `path` consists of floats of 8 bits."""
    name = f"{path}.weight"
    return name in files and files.place(name).dtype == FLOAT8


def take_float8(files: TensorFiles, path: str, shape: tuple[int, int]) -> Tensor:
    """Return the codes uint8 of such a weight, after looking that none is NaN."""
    name = f"{path}.weight"
    codes: Tensor = take(files, name, (FLOAT8,), shape).view(torch.uint8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise CheckpointError(
            f"{files.path(name)}: expected finite values in tensor {name!r}, got NaN"
        )
    return codes


def is_size(size: object) -> bool:
    """Whether a setting is a list of two integers above 0."""
    return isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)


def take_block_scales(
    files: TensorFiles, name: str, shape: tuple[int, int], block: Sequence[int]
) -> Tensor:
    """Return scales [out, groups] from those of blocks of `block` outputs and inputs.

    The last block of a row or a column may be smaller. Groups are as large as blocks and
    in_features allow.
    """
    (out, columns), (rows, width) = shape, block
    scales = take_scales(files, name, (-(-out // rows), -(-columns // width)))
    scales = scales.repeat_interleave(rows, 0)[:out]
    if columns <= width:
        return scales
    size = gcd(width, columns)
    fitting = [known for known in GROUP_SIZES if size % known == 0]
    if not fitting:
        raise CheckpointError(
            f"{files.path(name)}: expected blocks of tensor {name!r} and in_features with a common "
            f"divisor of {', '.join(map(str, GROUP_SIZES))}, got {width} and {columns}"
        )
    return scales.repeat_interleave(width // fitting[-1], 1)[:, : columns // fitting[-1]]


def take_tensor_scale(files: TensorFiles, name: str, out: int) -> Tensor:
    """Return the scale of a whole tensor for each output, [out, 1]."""
    place = files.place(name)
    return take_scales(files, name, place.shape).reshape(1, 1).expand(out, 1)


def is_tensor_scale(files: TensorFiles, name: str) -> bool:
    """Whether a tensor is the scale of a whole weight."""
    return files.place(name).shape in ((), (1,), (1, 1))


def _unless_middle(zero_points: Tensor, format: str) -> Tensor | None:
    """Return zero points, or None where all are that of symmetric codes."""
    middle = FORMATS[format].middle
    assert middle is not None
    return None if bool((zero_points == middle).all()) else zero_points


def in_groups(
    files: TensorFiles, name: str, codes: Tensor, groups: int
) -> tuple[Tensor, Tensor | None]:
    """Return codes with the columns of each group together, and the order of the columns.

    name: of the tensor that gives the group of each column; without it codes stay as they are.
    """
    order = _sorted_groups(files, name, codes.shape[1], groups) if name in files else None
    return (codes, None) if order is None else (codes[:, order], order)


def known_groups(
    path: str,
    format: str,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    order: Tensor | None = None,
    activation_dtype: str | None = None,
) -> Codes:
    """Return the weight of the module at `path`, in groups of a size that kernels know.

    Groups larger than that are cut: their parts have the same scale. Zero points that all are those
    of symmetric codes are left out. The other arguments are the fields of `Codes`.
    """
    if zero_points is not None:
        zero_points = _unless_middle(zero_points, format)
    found = Codes(format, codes, scales, zero_points, order, activation_dtype)
    largest = GROUP_SIZES[-1]
    size = codes.shape[1] // scales.shape[1]
    if scales.shape[1] == 1 or size in GROUP_SIZES:
        return found
    if size % largest:
        raise CheckpointError(
            f"checkpoint: expected {path} to have groups of {', '.join(map(str, GROUP_SIZES))}, "
            f"multiples of {largest} or whole rows, got {size}"
        )
    found.scales = scales.repeat_interleave(size // largest, 1)
    if zero_points is not None:
        found.zero_points = zero_points.repeat_interleave(size // largest, 1)
    return found


def _sorted_groups(files: TensorFiles, name: str, columns: int, groups: int) -> Tensor | None:
    """Return the order of columns that brings each group together, or None if they stand so.

    name: of a tensor int32 [columns] with the group of each column ("act-order").
    """
    index = take(files, name, (torch.int32, torch.int64), (columns,)).long()
    size = columns // groups
    if bool((index == torch.arange(columns, device="cpu") // size).all()):
        return None
    inside = bool(((index >= 0) & (index < groups)).all())
    if not inside or bool((torch.bincount(index, minlength=groups) != size).any()):
        raise CheckpointError(
            f"{files.path(name)}: expected tensor {name!r} to put {size} columns into each of "
            f"{groups} groups, got other groups"
        )
    return index.argsort(stable=True)
