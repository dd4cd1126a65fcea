"""What the zoo sets in `optimize`, so that small models are treated as large ones are."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

from oxytorch.optimize.passes import precision


def _leave_a_third(context: Any) -> None:
    """Choose by chance which layers are converted, so that all mixtures occur."""
    if context.sample is None:
        return  # all of them, there
    layers = precision.candidates(context)
    precision.leave(context, {m for m in layers if zlib.crc32(context.paths[m].encode()) % 3 == 0})


_SETTINGS = (
    # Layers of any size are packed.
    ("oxytorch.optimize.passes.pack", "SMALLEST_LINEAR", 0),
    # Whether that pays or not.
    ("oxytorch.rewriting.measure", "TIMED", False),
    # Layers that keep their dtype among converted ones, by chance and not by time.
    ("oxytorch.optimize.passes.precision", "choose", _leave_a_third),
    # Which pass wins is chance with models this small: one round decides as well as nine.
    ("oxytorch.rewriting.turns", "ROUNDS", 1),
    # Small models run as programs by default, too, from the second call of an input signature on.
    ("oxytorch.optimize.passes.program", "LEAST_WEIGHTS", 0),
    ("oxytorch.optimize.later", "CALLS", 2),
    # Values that are made of weights are made piece by piece, as those of large ones are.
    ("oxytorch.program.derived", "LARGE", 0),
)


def for_small_models() -> list[tuple[object, str, Any]]:
    """Return (module, attribute, value) of each; AttributeError where one is no longer there."""
    found = []
    for module_name, attribute, value in _SETTINGS:
        module = importlib.import_module(module_name)
        if getattr(module, attribute, None) is None:
            raise AttributeError(
                f"zoo: expected {module_name}.{attribute}, which the zoo sets to {value} for its "
                "small models; name its successor in tests/zoo/settings.py"
            )
        found.append((module, attribute, value))
    return found
