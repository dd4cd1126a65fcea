"""Weights of 4 and 8 bits: `quantize_`, and models on disk.

report = oxytorch.quantize_(model, oxytorch.quantization.Int4Weight(group_size=128))
"""

from __future__ import annotations

from ..core.errors import CheckpointError
from .configs import (
    Int4Weight,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8Weight,
    NF4Weight,
    WeightConfig,
)
from .load import load_quantized
from .quantize import quantize_
from .report import QuantizationReport, QuantizedLayer
from .store import save_quantized
from .weights import quantized

__all__ = [
    "CheckpointError",
    "Int4Weight",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8Weight",
    "NF4Weight",
    "QuantizationReport",
    "QuantizedLayer",
    "WeightConfig",
    "load_quantized",
    "quantize_",
    "quantized",
    "save_quantized",
]
