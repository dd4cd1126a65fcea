"""Layers and networks under one name each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch

from .layers import KINDS, eight_bits
from .networks import NETWORKS

MODELS: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor], str]] = {
    **{name: (kind.build, kind.sample, kind.form) for name, kind in KINDS.items()},
    **{name: (*pair, "default") for name, pair in NETWORKS.items()},
    "quantized": (eight_bits, KINDS["linear"].sample, "int8"),
}
"""How to build each and a sample of its input, and the form in which it is optimized by default."""


def cases(names: Collection[str], ways: Iterable[str], often: Collection[str]) -> list[Any]:
    """Each model with each way; slow but for the models of `often`."""
    return [
        pytest.param(name, way, id=f"{name}-{way}", marks=() if name in often else pytest.mark.slow)
        for way in ways
        for name in names
    ]
