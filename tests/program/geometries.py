"""What the tests of convolutions have in common: the plain layer, and its usual geometries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

USUAL: dict[str, dict[str, Any]] = {
    "as usual": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "without bias": {"bias": False, "channels": 5},
}


def alone(m: Any, x: Tensor) -> Tensor:
    return m.c(x)  # type: ignore[no-any-return]
