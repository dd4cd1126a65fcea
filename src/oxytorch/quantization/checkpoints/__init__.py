"""Quantized checkpoints that other programs write, read into our layout without those programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import CheckpointError
from .awq import Awq
from .compressed_tensors import CompressedTensors
from .fp8 import Fp8
from .gptq import Gptq
from .scheme import Codes, Scheme

SCHEMES: dict[str, type[Scheme]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
}


def scheme_of(config: Mapping[str, Any], source: str) -> Scheme:
    """Return what reads weights stored as a `quantization_config` says.

    source: where the configuration stands, for errors. Raises CheckpointError for what is unknown.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise CheckpointError(
            f"{source}: expected quantization_config.quant_method to be one of "
            f"{', '.join(SCHEMES)}, got {method!r}"
        )
    return SCHEMES[method](config, source)


__all__ = ["SCHEMES", "Codes", "Scheme", "scheme_of"]
