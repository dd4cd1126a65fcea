"""oxytorch makes PyTorch models run faster on the machine you already have.

Importing it changes nothing in PyTorch: no operator is replaced, no thread pinned, no environment
variable written. Everything else is asked for by name and can be undone.
"""

from __future__ import annotations

__version__ = "0.1.0"

import sys
from typing import TYPE_CHECKING

from . import _lazy, _library, config, isa, ops

if TYPE_CHECKING:
    from . import compat, graph, llm, memory, optim, quantization, runtime
    from .core.errors import CheckpointError
    from .files import load, save
    from .graph.errors import DtypeError
    from .math_mode import fp32_math_mode, get_fp32_math_mode, set_fp32_math_mode
    from .optimize import explain, optimize, undo
    from .optimize.verify import VerificationError
    from .quantization import load_quantized, quantize, quantize_, save_quantized
    from .verbose import verbose

cmake_prefix_path = str(_library.PATH.parents[1] / "share" / "cmake")
"""For CMake: the folder in which `find_package(oxytorch CONFIG)` finds this package."""

_library.warn_if_missing()
isa.apply_environment()

__all__ = [
    "CheckpointError",
    "DtypeError",
    "VerificationError",
    "__version__",
    "cmake_prefix_path",
    "compat",
    "config",
    "explain",
    "fp32_math_mode",
    "get_fp32_math_mode",
    "graph",
    "isa",
    "llm",
    "load",
    "load_quantized",
    "memory",
    "ops",
    "optim",
    "optimize",
    "quantization",
    "quantize",
    "quantize_",
    "runtime",
    "save",
    "save_quantized",
    "set_fp32_math_mode",
    "undo",
    "verbose",
]

_LATER = {
    "CheckpointError": "core.errors",
    "DtypeError": "graph.errors",
    "VerificationError": "optimize.verify",
    "compat": "compat",
    "explain": "optimize",
    "fp32_math_mode": "math_mode",
    "get_fp32_math_mode": "math_mode",
    "graph": "graph",
    "llm": "llm",
    "load": "files",
    "load_quantized": "quantization",
    "memory": "memory",
    "optim": "optim",
    "optimize": "optimize",
    "quantization": "quantization",
    "quantize": "quantization",
    "quantize_": "quantization",
    "runtime": "runtime",
    "save": "files",
    "save_quantized": "quantization",
    "set_fp32_math_mode": "math_mode",
    "undo": "optimize",
    "verbose": "verbose",
}
sys.modules[__name__].__class__ = _lazy.Package
