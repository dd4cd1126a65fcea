"""The predecessor's public names: which are served by what, and what to do in place of others.

This is the one list: `oxytorch.compat.ipex` is made from it, and so are the tables of
docs/migrate.md (`python tools/write_migrate.py`).
"""

from __future__ import annotations

from . import front, language, operators, processor, quantization, xpu
from .name import Name

__all__ = ["NAMES", "NAMESPACES", "Name"]

_ALL: tuple[Name, ...] = (
    *front.NAMES,
    *language.NAMES,
    *quantization.NAMES,
    *processor.NAMES,
    *xpu.NAMES,
    *operators.NAMES,
)
NAMES: dict[str, Name] = {name.path: name for name in _ALL}
"""By the path below the package; those of `torch.ops.torch_ipex` begin with "torch_ipex."."""

NAMESPACES: tuple[str, ...] = tuple(
    dict.fromkeys(
        ".".join(parts[:count])
        for parts in (name.path.split(".") for name in _ALL)
        for count in range(1, len(parts))
    )
)
"""The modules that names are in, those above others first."""
