"""Checkpoints of "fp8", as DeepSeek publishes them and transformers writes them.

weight            float8_e4m3fn [out, in]
weight_scale_inv  float32 or float8_e8m0fnu [out / 128, in / 128], each rounded up: by what a block
                  is multiplied, in spite of its name; or one number for the whole weight.
                  "weight_scale" in the files of some programs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import CheckpointError
from ...core.tensor_file import TensorFiles
from .scheme import (
    Codes,
    Scheme,
    holds_float8,
    is_size,
    is_tensor_scale,
    known_groups,
    take_block_scales,
    take_float8,
    take_tensor_scale,
)


class Fp8(Scheme):
    """E4M3 weights, with scales of blocks or of whole weights; activations stay as they are."""

    suffixes = ("weight_scale_inv", "weight_scale")
    # Scales of activations, which are not rounded here, and of a cache, which has its own.
    ignored = ("activation_scale", "input_scale", "k_scale", "v_scale")

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        super().__init__(config, source)
        self.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        self.block = config.get("weight_block_size")
        if self.block is not None and not is_size(self.block):
            raise self.refuse("weight_block_size", "null or two sizes above 0", self.block)

    def holds(self, files: TensorFiles, path: str) -> bool:
        return holds_float8(files, path)

    def read(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> Codes:
        codes = take_float8(files, path, shape)
        names = [f"{path}.{suffix}" for suffix in self.suffixes]
        name = next((name for name in names if name in files), None)
        if name is None:
            raise CheckpointError(f"checkpoint: expected a tensor {names[0]!r}, found none")
        if is_tensor_scale(files, name) and self.block is None:
            return Codes("fp8", codes, take_tensor_scale(files, name, shape[0]), None)
        if self.block is None:
            raise self.refuse(
                "weight_block_size", f"to tell what the scales of {name} belong to", None
            )
        scales = take_block_scales(files, name, shape, self.block)
        return known_groups(path, "fp8", codes, scales, None)
