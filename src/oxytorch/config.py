"""Every knob of oxytorch and the environment variable behind it, read once at import.

No other file reads the environment; `docs/environment.md` is generated from this one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _variable(name: str, meaning: str) -> str:
    """Declares a field that is read from the environment variable `name`; empty means unset."""
    return field(default="", metadata={"variable": name, "meaning": meaning})


def _list(name: str, meaning: str) -> str | None:
    """Declares a field that is None if unset, and "" if set but empty: an empty list."""
    return field(default=None, metadata={"variable": name, "meaning": meaning, "list": True})


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
    gpu: str = _variable(
        "OXYTORCH_GPU",
        "How a kernel gets onto a GPU: `aot` (only images compiled ahead of time), `jit` (only "
        "code that the driver compiles), `triton` (only Triton's compiler), `off` (plain PyTorch). "
        "Not set: the first of these that works.",
    )
    aot_devices: str | None = _list(
        "OXYTORCH_AOT_DEVLIST",
        "GPUs to compile kernels for when a wheel is built, or by `oxytorch aot build` without "
        "--devices: names from `oxytorch aot list`, separated by commas. Set but empty: none.",
    )
    use_aot_devices: str | None = _list(
        "USE_AOT_DEVLIST", "The same; OXYTORCH_AOT_DEVLIST wins over it."
    )
    cache_home: str = _variable(
        "XDG_CACHE_HOME",
        "Where files are kept that can be made again, in `oxytorch/`. Not set: `~/.cache`.",
    )
    data_home: str = _variable(
        "XDG_DATA_HOME",
        "Where images are kept that `oxytorch aot build` made for this user, in `oxytorch/`. "
        "Not set: `~/.local/share`.",
    )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Config:
        """Reads every field from `environment`."""
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            value = environment.get(entry.metadata["variable"])
            absent = None if entry.metadata.get("list") else ""
            values[entry.name] = absent if value is None else value.strip()
        return cls(**values)


current = Config.read(os.environ)
# What os.environ holds, for those who watch what a user's code reads there.
environment: dict[Any, Any] = vars(os.environ)["_data"]


def cache_folder(name: str) -> Path | None:
    """Where files of a kind are kept that can be made again; None for a user without a home."""
    if current.cache_home:
        return Path(current.cache_home) / "oxytorch" / name
    try:
        return Path.home() / ".cache" / "oxytorch" / name
    except RuntimeError:
        return None
