"""Weights of 4 and 8 bits: `quantize_`, and models on disk; layers of 8-bit integers: `quantize`.

report = oxytorch.quantize_(model, oxytorch.quantization.Int4Weight(group_size=128))
faster = oxytorch.quantize(model, calibration_data)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy
from ..core.errors import CheckpointError

if TYPE_CHECKING:
    from .configs import (
        Float8Weight,
        Int4Weight,
        Int8DynamicActivationInt4Weight,
        Int8DynamicActivationInt8Weight,
        Int8Weight,
        NF4Weight,
        WeightConfig,
    )
    from .load import load_quantized
    from .quantization_report import QuantizationReport, QuantizedLayer
    from .static.convert import convert, quantize
    from .static.errors import ErrorReport, LayerError, report
    from .static.prepare import Int8StaticActivationInt8Weight, prepare, recipe_of
    from .static.recipe import LayerRecipe, Recipe, load_recipe, save_recipe
    from .static.training import freeze_batch_norms, freeze_ranges, prepare_qat
    from .static.tuning import Autotuned, Trial, autotune
    from .store import save_quantized
    from .weight_only import quantize_
    from .weights import quantized

__all__ = [
    "Autotuned",
    "CheckpointError",
    "ErrorReport",
    "Float8Weight",
    "Int4Weight",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8StaticActivationInt8Weight",
    "Int8Weight",
    "LayerError",
    "LayerRecipe",
    "NF4Weight",
    "QuantizationReport",
    "QuantizedLayer",
    "Recipe",
    "Trial",
    "WeightConfig",
    "autotune",
    "convert",
    "freeze_batch_norms",
    "freeze_ranges",
    "load_quantized",
    "load_recipe",
    "prepare",
    "prepare_qat",
    "quantize",
    "quantize_",
    "quantized",
    "recipe_of",
    "report",
    "save_quantized",
    "save_recipe",
]

_LATER = {
    "Autotuned": "static.tuning",
    "Trial": "static.tuning",
    "autotune": "static.tuning",
    "ErrorReport": "static.errors",
    "Float8Weight": "configs",
    "Int4Weight": "configs",
    "Int8DynamicActivationInt4Weight": "configs",
    "Int8DynamicActivationInt8Weight": "configs",
    "Int8StaticActivationInt8Weight": "static.prepare",
    "Int8Weight": "configs",
    "LayerError": "static.errors",
    "LayerRecipe": "static.recipe",
    "NF4Weight": "configs",
    "QuantizationReport": "quantization_report",
    "QuantizedLayer": "quantization_report",
    "Recipe": "static.recipe",
    "WeightConfig": "configs",
    "convert": "static.convert",
    "freeze_batch_norms": "static.training",
    "freeze_ranges": "static.training",
    "load_quantized": "load",
    "load_recipe": "static.recipe",
    "prepare": "static.prepare",
    "prepare_qat": "static.training",
    "quantize": "static.convert",
    "quantize_": "weight_only",
    "recipe_of": "static.prepare",
    "report": "static.errors",
    "quantized": "weights",
    "save_quantized": "store",
    "save_recipe": "static.recipe",
}
sys.modules[__name__].__class__ = _lazy.Package
