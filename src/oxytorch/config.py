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
        "Instruction-set level whose kernels run, instead of the best one that the processor "
        "supports. `oxytorch info` lists the levels.",
    )
    cpu_capability: str = _variable(
        "ATEN_CPU_CAPABILITY",
        "PyTorch's own upper bound on its CPU kernels (`default`, `avx2`, `avx512`); it also "
        "bounds oxytorch's level. `OXYTORCH_ISA` takes precedence.",
    )
    gpu: str = _variable(
        "OXYTORCH_GPU",
        "How kernels are loaded onto a GPU: `aot` (images compiled ahead of time), `jit` (code "
        "that the driver compiles), `triton` (Triton's compiler) or `off` (plain PyTorch). "
        "Default: the first of `aot`, `jit` and `triton` that works.",
    )
    aot_devices: str | None = _list(
        "OXYTORCH_AOT_DEVLIST",
        "GPUs to compile kernels for when a wheel is built, or by `oxytorch aot build` without "
        "`--devices`: names from `oxytorch aot list`, separated by commas. "
        "An empty value means none.",
    )
    use_aot_devices: str | None = _list(
        "USE_AOT_DEVLIST",
        "Another name of `OXYTORCH_AOT_DEVLIST`, which takes precedence.",
    )
    cache_home: str = _variable(
        "XDG_CACHE_HOME",
        "Folder of the cache; oxytorch writes to its subfolder `oxytorch`. Default: `~/.cache`.",
    )
    data_home: str = _variable(
        "XDG_DATA_HOME",
        "Folder of the user's data: images that `oxytorch aot build` compiles for this user are in "
        "its subfolder `oxytorch/images`. Default: `~/.local/share`.",
    )
    serve_token: str = _variable(
        "OXYTORCH_SERVE_TOKEN",
        "What clients of `oxytorch serve` have to give, where `--token` is not given.",
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


def environment_of_processes() -> dict[str, str]:
    """A copy of the environment as it is now, which processes started from here get."""
    return dict(os.environ)


def cache_folder(name: str) -> Path | None:
    """Where files of a kind are kept that can be made again; None for a user without a home."""
    if current.cache_home:
        return Path(current.cache_home) / "oxytorch" / name
    try:
        return Path.home() / ".cache" / "oxytorch" / name
    except RuntimeError:
        return None
