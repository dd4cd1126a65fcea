"""Every knob of oxytorch and the environment variable behind it, read once at import.

No other file reads the environment; `docs/environment.md` is generated from this one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field


def _variable(name: str, meaning: str) -> str:
    """Declares a field that is read from the environment variable `name`; empty means unset."""
    return field(default="", metadata={"variable": name, "meaning": meaning})


@dataclass(frozen=True)
class Config:
    """The settings of this process."""

    isa: str = _variable(
        "OXYTORCH_ISA",
        "Run the kernels of this instruction-set level (`oxytorch info` lists them) "
        "instead of the best one that the processor supports.",
    )
    cpu_capability: str = _variable(
        "ATEN_CPU_CAPABILITY",
        "PyTorch's own bound on its CPU kernels (default, avx2, avx512). "
        "oxytorch honours it as an upper bound; OXYTORCH_ISA wins over it.",
    )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Config:
        """Reads every field from `environment`."""
        return cls(
            **{
                entry.name: environment.get(entry.metadata["variable"], "").strip()
                for entry in dataclasses.fields(cls)
            }
        )


current = Config.read(os.environ)
