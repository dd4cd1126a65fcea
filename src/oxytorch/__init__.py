"""oxytorch makes PyTorch models run faster on the machine you already have.

Importing it changes nothing in PyTorch: no operator is replaced, no thread pinned, no environment
variable written. Everything else is asked for by name and can be undone.
"""

from __future__ import annotations

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

from . import _library, config, isa, ops, optim
from .optimize import explain, optimize, undo

_library.warn_if_missing()
isa.apply_environment()

if TYPE_CHECKING:
    from . import quantization
    from .quantization import load_quantized, quantize_, save_quantized

_LATER = {
    "llm": "llm",
    "quantization": "quantization",
    "quantize_": "quantization",
    "save_quantized": "quantization",
    "load_quantized": "quantization",
}
"""Public names whose module is imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    return module if name == _LATER[name] else getattr(module, name)


__all__ = [
    "__version__",
    "config",
    "explain",
    "isa",
    "llm",
    "load_quantized",
    "ops",
    "optim",
    "optimize",
    "quantization",
    "quantize_",
    "save_quantized",
    "undo",
]
