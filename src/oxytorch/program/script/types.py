"""Operators that TorchScript calls."""

from __future__ import annotations

from typing import Any

import torch

from ..words import operator_named


def operator_of(node: Any) -> Any:
    """The operator that a node calls, None if it is none of the dispatcher's."""
    text = node.schema()
    if text == "(no schema)":
        return None
    schema = torch._C.parse_schema(text)
    return operator_named(f"{schema.name}.{schema.overload_name}")
