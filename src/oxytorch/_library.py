"""Loads the compiled library, or says in one line why it cannot be used."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
PATH = Path(__file__).parent / "lib" / "liboxytorch.so"


def torch_version() -> tuple[int, int]:
    """Major and minor number of the torch that is imported."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None:
        raise RuntimeError(f"cannot read the version of torch: {torch.__version__!r}")
    return int(found[1]), int(found[2])


def _load() -> str:
    """Loads the library; returns the reason why it is not loaded, or an empty string."""
    if torch_version() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"torch {torch.__version__} is older than {oldest}; upgrade torch"
    if not PATH.exists():
        return f"the compiled library is missing ({PATH}); reinstall oxytorch"
    try:
        torch.ops.load_library(PATH)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the compiled library cannot be loaded ({error}); reinstall oxytorch"
    return ""


why_missing = _load()
loaded = not why_missing


def warn_if_missing() -> None:
    """Warns once, in one line, when kernels are replaced by plain PyTorch."""
    if why_missing:
        warnings.warn(
            f"oxytorch runs its plain-PyTorch references: {why_missing}",
            RuntimeWarning,
            stacklevel=3,
        )
