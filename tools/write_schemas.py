"""Writes tests/packaging/schemas.json: the schemas of all ops, which saved programs rely on.

Run it after adding an op. A change to a line that is there already breaks saved programs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from oxytorch import ops

TARGET = Path(__file__).parents[1] / "tests" / "packaging" / "schemas.json"


def schemas() -> dict[str, str]:
    """Schema of each overload of each registered op, as torch prints it."""
    found = {}
    for name in ops.registry():
        packet = getattr(torch.ops.oxytorch, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            found[str(schema.name) + (f".{overload}" if overload != "default" else "")] = str(
                schema
            )
    return dict(sorted(found.items()))


if __name__ == "__main__":
    TARGET.write_text(json.dumps(schemas(), indent=2) + "\n")
