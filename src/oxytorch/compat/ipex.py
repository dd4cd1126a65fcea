"""The predecessor's package: `import oxytorch.compat.ipex as ipex`, which changes nothing."""

from __future__ import annotations

import sys
from typing import Any

from .names import NAMESPACES
from .namespace import Namespace, look_up, names_below

for _path in NAMESPACES:
    sys.modules[f"{__name__}.{_path}"] = Namespace(f"{__name__}.{_path}", _path)


def __getattr__(name: str) -> Any:
    return look_up(__name__, "", name, globals())


def __dir__() -> list[str]:
    return names_below("")
