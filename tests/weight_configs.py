"""The choices of `quantize_` that tests go through, and what rounding a weight may change."""

from __future__ import annotations

from oxytorch import quantization
from oxytorch.quantization import WeightConfig

MOST_ERROR: dict[WeightConfig, float] = {
    quantization.Int8Weight(): 0.012,
    quantization.Int8Weight(group_size=64, symmetric=False): 0.008,
    quantization.Int8DynamicActivationInt8Weight(): 0.02,
    quantization.Int4Weight(): 0.11,
    quantization.Int4Weight(group_size=None): 0.13,
    quantization.Int4Weight(group_size=32, symmetric=False): 0.09,
    quantization.Int8DynamicActivationInt4Weight(group_size=64): 0.1,
    quantization.NF4Weight(): 0.1,
    quantization.Float8Weight(): 0.03,
    quantization.Float8Weight(block_size=(128, 128)): 0.03,
    quantization.Float8Weight(group_size=32): 0.03,
}
"""The most that a layer's result may differ, relative to the result of the plain weight."""
ONE_OF_EACH = [*{type(config): config for config in MOST_ERROR}.values()]
