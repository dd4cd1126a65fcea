"""Writes tests/packaging/schemas.json: the schemas of all ops, which saved programs rely on.

Run it after adding an op. A change to a line that is there already breaks saved programs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import oxytorch  # noqa: F401  (loads the library)

TARGET = Path(__file__).parents[1] / "tests" / "packaging" / "schemas.json"

TESTS_ONLY = {"scale", "faulty"}
"""Ops that wheels do not have."""


def schemas() -> dict[str, str]:
    """Schema of each overload of each op of the wheel, as torch prints it."""
    found = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.partition(".")
        if name.startswith("oxytorch::") and name.removeprefix("oxytorch::") not in TESTS_ONLY:
            packet = getattr(torch.ops.oxytorch, name.removeprefix("oxytorch::"))
            found[qualified] = str(getattr(packet, overload or "default")._schema)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    TARGET.write_text(json.dumps(schemas(), indent=2) + "\n")
