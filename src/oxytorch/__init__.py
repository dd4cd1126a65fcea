"""oxytorch makes PyTorch models run faster on the machine you already have.

Importing it changes nothing in PyTorch: no operator is replaced, no thread pinned, no environment
variable written. Everything else is asked for by name and can be undone.
"""

from __future__ import annotations

__version__ = "0.1.0"

from . import _library, config, isa, ops

if (_library.PATH.parents[1] / "optimize" / "__init__.py").exists():
    from .optimize import explain, optimize, undo  # noqa: F401

_library.warn_if_missing()
isa.apply_environment()

__all__ = ["__version__", "config", "isa", "ops"]
