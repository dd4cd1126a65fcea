"""The predecessor's names: programs for Intel Extension for PyTorch (IPEX) run with oxytorch.

`import oxytorch.compat.ipex as ipex` has its public Python API. After `install()` programs
that import `intel_extension_for_pytorch` run unmodified, as they do by
`python -m oxytorch.compat script.py`. docs/migrate.md lists every name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from . import ipex
    from .door import install, uninstall
    from .errors import NotServedError

__all__ = ["NotServedError", "install", "ipex", "uninstall"]

_LATER = {"NotServedError": "errors", "install": "door", "ipex": "ipex", "uninstall": "door"}
sys.modules[__name__].__class__ = _lazy.Package
