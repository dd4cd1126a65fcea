"""Checkpoints of AWQ (Lin et al., 2023), as AutoAWQ writes them for its "gemm" kernels.

qweight  int32 [in, out / 8]       8 outputs in a word, in the order 0 2 4 6 1 3 5 7
qzeros   int32 [groups, out / 8]   likewise
scales   float16 [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...core.tensor_file import TensorFiles
from .scheme import Codes, Scheme, fields_of, known_groups, take, take_scales

_FIELD_OF_OUTPUT = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")


class Awq(Scheme):
    """4 bits with zero points and groups or whole rows."""

    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        super().__init__(config, source)
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise self.refuse("bits", "4", bits)
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise self.refuse("version", "'gemm'", version)

    def read(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> Codes:
        out, columns = shape
        if out % 8:
            raise CheckpointError(
                f"checkpoint: expected {path} to have a multiple of 8 out_features, got {out}"
            )
        words = take(files, f"{path}.qweight", (torch.int32,), (columns, out // 8))
        codes = _outputs(words).t().contiguous()
        name = f"{path}.scales"
        groups = files.place(name).shape[0] if name in files else 1
        if not groups or columns % groups:
            raise CheckpointError(
                f"{files.path(name)}: expected tensor {name!r} to have a number of rows (groups) "
                f"that divides in_features {columns}, got {groups}"
            )
        scales = take_scales(files, name, (groups, out)).t().contiguous()
        zeros = None
        if self.config.get("zero_point", True) or f"{path}.qzeros" in files:
            words = take(files, f"{path}.qzeros", (torch.int32,), (groups, out // 8))
            zeros = _outputs(words).t().contiguous()
        return known_groups(path, "int4", codes, scales, zeros)


def _outputs(words: Tensor) -> Tensor:
    """Fields of words [rows, out / 8] in the order of outputs, [rows, out]."""
    return fields_of(words, 4)[..., _FIELD_OF_OUTPUT].flatten(1)
