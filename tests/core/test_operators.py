"""What operators do with their arguments, as their schemas say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oxytorch.core.operators import Uses, uses_of

_aten = torch.ops.aten
NONE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("operator", "wanted"),
    [
        (_aten.mm.default, Uses(("self", "mat2"), NONE, NONE, (False, False), True, False)),
        (_aten.t.default, Uses(("self",), NONE, frozenset({"self"}), (True,), True, False)),
        (
            _aten.mul_.Tensor,
            Uses(("self", "other"), frozenset({"self"}), NONE, (False, False), False, False),
        ),
        (_aten.cat.default, Uses(("tensors", "dim"), NONE, NONE, (False, False), False, False)),
        (
            _aten.mm.out,
            Uses(("self", "mat2", "out"), frozenset({"out"}), NONE, (False,) * 3, False, False),
        ),
        (_aten.t_.default, Uses(("self",), frozenset({"self"}), NONE, (False,), False, True)),
        (
            _aten.to.device,
            Uses(
                ("self", "device", "dtype", "non_blocking", "copy", "memory_format"),
                NONE,
                frozenset({"self"}),
                (True, *[False] * 5),
                True,
                False,
                True,
            ),
        ),
    ],
    ids=str,
)
def test_schemas_are_read(operator: Any, wanted: Uses) -> None:
    assert uses_of(operator) == wanted
