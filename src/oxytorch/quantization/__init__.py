"""Weights of 4 and 8 bits: `quantize_`, and models on disk.

report = oxytorch.quantize_(model, oxytorch.quantization.Int4Weight(group_size=128))
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy
from ..core.errors import CheckpointError

if TYPE_CHECKING:
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

_LATER = {
    "Int4Weight": "configs",
    "Int8DynamicActivationInt4Weight": "configs",
    "Int8DynamicActivationInt8Weight": "configs",
    "Int8Weight": "configs",
    "NF4Weight": "configs",
    "QuantizationReport": "report",
    "QuantizedLayer": "report",
    "WeightConfig": "configs",
    "load_quantized": "load",
    "quantize_": "quantize",
    "quantized": "weights",
    "save_quantized": "store",
}
sys.modules[__name__].__class__ = _lazy.Package
