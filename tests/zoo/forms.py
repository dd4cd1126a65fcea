"""Outputs of models: which tensors they hold, and how two outputs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Leaves = dict[str, torch.Tensor]
"""Place in an output -> tensor."""

BEYOND = 1e30
"""Values that stand for minus infinity in masks are compared as such."""


def parts(value: Any) -> dict[str, Any] | None:
    """What a structured value consists of; None for tensors and plain values."""
    if isinstance(value, (torch.Tensor, str, bytes, int, float, bool, type(None))):
        return None
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return {str(index): part for index, part in enumerate(value)}
    if isinstance(value, torch.distributions.Distribution) or not hasattr(value, "__dict__"):
        return None
    return {key: part for key, part in vars(value).items() if not callable(part)}


def tensors_of(value: Any, path: str = "") -> Leaves:
    """All tensors of an output by their place."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach().clone()}
    found: Leaves = {}
    for key, part in (parts(value) or {}).items():
        found.update(tensors_of(part, f"{path}.{key}" if path else key))
    return found


def difference_in_form(stock: Any, ours: Any, dtypes: bool, path: str = "output") -> str | None:
    """Return the first place where two outputs differ in class, keys, shape or plain values.

    dtypes: whether those of tensors have to agree too.
    """
    if type(stock) is not type(ours):
        return f"{path} is a {type(ours).__name__}, stock gives a {type(stock).__name__}"
    if isinstance(stock, torch.Tensor):
        if stock.shape != ours.shape:
            return f"{path} has shape {[*ours.shape]}, stock gives {[*stock.shape]}"
        if dtypes and stock.dtype != ours.dtype:
            return f"{path} is {ours.dtype}, stock gives {stock.dtype}"
        return None
    inside, others = parts(stock), parts(ours)
    if inside is None or others is None:
        plain = isinstance(stock, (str, bytes, int, bool, type(None)))
        return f"{path} is {ours!r}, stock gives {stock!r}" if plain and stock != ours else None
    if [*inside] != [*others]:
        return f"{path} has the keys {[*others]}, stock gives {[*inside]}"
    for key in inside:
        found = difference_in_form(inside[key], others[key], dtypes, f"{path}.{key}")
        if found is not None:
            return found
    return None


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinity where one is no number."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(found.to(expected.dtype), expected) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    usual = expected.abs() < BEYOND
    if not torch.equal(usual, found.abs() < BEYOND):
        return float("inf")
    if not usual.any():
        return 0.0
    gap = (found - expected)[usual].abs().max()
    return float(gap / expected[usual].abs().max().clamp_min(1e-6))


MOST_ERROR = 1e-4
"""What `assert_alike` allows of the largest value."""


def assert_alike(found: Any, expected: Any) -> None:
    """Results of one form, and of values of about the same."""
    assert difference_in_form(expected, found, True) is None
    ours, theirs = tensors_of(found), tensors_of(expected)
    for path, tensor in theirs.items():
        assert relative_error(ours[path], tensor) < MOST_ERROR, path
