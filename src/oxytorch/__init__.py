"""oxytorch makes PyTorch models run faster on the machine you already have.

Importing it changes nothing in PyTorch: no operator is replaced, no thread pinned, no environment
variable written. Everything else is asked for by name and can be undone.
"""

from __future__ import annotations

__version__ = "0.1.0"

from . import _library, config, isa, ops, optim
from .optimize import explain, optimize, undo

_library.warn_if_missing()
isa.apply_environment()

__all__ = ["__version__", "config", "explain", "isa", "ops", "optim", "optimize", "undo"]
