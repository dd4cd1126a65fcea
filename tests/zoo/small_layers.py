"""The size below which `optimize` leaves layers unpacked, which the zoo sets to 0."""

from __future__ import annotations

from types import ModuleType


def attribute() -> tuple[ModuleType, str]:
    """Return the module and the name of the limit; AttributeError where it is no longer there."""
    from oxytorch.optimize.passes import pack

    name = "SMALLEST_LINEAR"
    if getattr(pack, name, None) is None:
        raise AttributeError(
            f"zoo: expected {pack.__name__}.{name}, the number of weights below which linear "
            "layers are not packed; the zoo sets it to 0, so that its small models are packed: "
            "name its successor in tests/zoo/small_layers.py"
        )
    return pack, name
