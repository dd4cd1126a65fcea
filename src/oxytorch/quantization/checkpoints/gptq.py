"""Checkpoints of GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel write them.

qweight  int32 [in * bits / 32, out]       codes of one output, in the order of inputs
qzeros   int32 [groups, out * bits / 32]   zero points less one ("gptq"), or as they are
                                           ("gptq_v2")
scales   float16 [groups, out]
g_idx    int32 [in]                        the group of each input; out of order ("act-order")
                                           where inputs were quantized by their importance
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import CheckpointError
from ...core.tensor_file import TensorFiles
from .scheme import Codes, Scheme, fields_of, in_groups, known_groups, take, take_scales


class Gptq(Scheme):
    """4 and 8 bits, symmetric or not, with groups or whole rows, with or without act-order."""

    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        super().__init__(config, source)
        form = self.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self.zeros_less_one = form == "gptq"
        self.one_of("bits", (4, 8))

    def read(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> Codes:
        out, columns = shape
        rows = files.place(f"{path}.qweight").shape[0]
        bits = 32 * rows // columns
        if bits not in (4, 8) or out * bits % 32 or columns * bits % 32:
            raise CheckpointError(
                f"{files.path(f'{path}.qweight')}: expected tensor '{path}.qweight' to hold codes "
                f"of 4 or 8 bits for [{out}, {columns}], got {rows} rows"
            )
        words = take(files, f"{path}.qweight", (torch.int32,), (columns * bits // 32, out))
        codes = fields_of(words, bits).transpose(0, 1).reshape(out, columns)
        groups = self._groups(files, path, columns)
        scales = take_scales(files, f"{path}.scales", (groups, out)).t().contiguous()
        words = take(files, f"{path}.qzeros", (torch.int32,), (groups, out * bits // 32))
        zeros = fields_of(words, bits).reshape(groups, out).t()
        if self.zeros_less_one:
            zeros = (zeros + 1) & (2**bits - 1)
        codes, order = in_groups(files, f"{path}.g_idx", codes, groups)
        return known_groups(path, f"int{bits}", codes, scales, zeros, order)

    def _groups(self, files: TensorFiles, path: str, columns: int) -> int:
        name = f"{path}.scales"
        if name not in files:
            raise CheckpointError(f"checkpoint: expected a tensor {name!r}, found none")
        shape = files.place(name).shape
        if len(shape) != 2 or not shape[0] or columns % shape[0]:
            raise CheckpointError(
                f"{files.path(name)}: expected tensor {name!r} to have a number of rows (groups) "
                f"that divides in_features {columns}, got {list(shape)}"
            )
        return shape[0]
