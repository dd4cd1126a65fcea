"""Run the original and the optimized model side by side and find where they part."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .context import normalized_sample
from .report import Report

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed, as a fraction of the largest value of the original's output, by the
narrowest dtype of the optimized model."""


class VerificationError(AssertionError):
    """The optimized model's answers differ from the original's beyond the tolerance."""


def compare(
    original: nn.Module, optimized: nn.Module, sample_input: Any, report: Report
) -> dict[str, float]:
    """Compare every changed module on the original's inputs, then the whole models.

    Returns the whole models' difference, the difference allowed and the number of modules
    compared. Raises VerificationError naming the first module, in order of execution, that differs
    by more than the tolerance.
    """
    args, kwargs = normalized_sample(sample_input)
    allowed = TOLERANCE[_narrowest(optimized)]
    counterparts = dict(optimized.named_modules())
    changed = {
        path for path, module in counterparts.items() if path and "forward" in module.__dict__
    }
    compared = 0

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (args, kwargs)
            given = copy.deepcopy(given) if _holds_state(given) else _cloned(given)
            with torch.no_grad():
                expected[path] = counterparts[path](*given[0], **given[1])

        return hook

    def after(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal compared
            if path not in expected:
                return
            compared += 1
            difference = _difference(output, expected.pop(path))
            if not difference <= allowed:
                kind = type(module).__name__
                raise VerificationError(
                    f"optimize: verify: {path} ({kind}) differs from the original by "
                    f"{difference:.2e} of its largest output, allowed {allowed:.2e}; "
                    f"leave it as it is (dtype={{..., {path!r}: torch.float32}}) or fewer passes"
                )

        return hook

    expected: dict[str, Any] = {}
    handles = []
    for path, module in original.named_modules():
        if path in changed:
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        with torch.no_grad():
            reference = original(*_cloned(args), **_cloned(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        result = optimized(*_cloned(args), **_cloned(kwargs))
    difference = _difference(reference, result)
    if not difference <= allowed:
        raise VerificationError(
            f"optimize: verify: the output of {type(optimized).__name__} differs from the "
            f"original's by {difference:.2e} of its largest value, allowed {allowed:.2e}, though "
            "no single module does: errors add up; keep some modules in float32 through dtype={...}"
        )
    return {"difference": difference, "allowed": allowed, "modules": float(compared)}


def _narrowest(model: nn.Module) -> torch.dtype:
    found = {p.dtype for p in model.parameters()}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in found:
            return dtype
    return torch.float32


def _holds_state(values: Any) -> bool:
    """Whether a call passes objects (a cache, say) that the callee may write to."""
    leaves = pytree.tree_leaves(values)
    plain = (torch.Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)
    return any(not isinstance(leaf, plain) for leaf in leaves)


def _cloned(values: Any) -> Any:
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, values)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All floating tensors in an output, in order; containers and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict) or hasattr(value, "keys"):
        for key in value.keys():  # noqa: SIM118 (transformers' outputs are no plain dicts)
            yield from _tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _difference(expected: Any, found: Any) -> float:
    """Largest difference of any output as a fraction of that output's largest value."""
    ours, theirs = [*_tensors(found)], [*_tensors(expected)]
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    worst = 0.0
    for mine, original in zip(ours, theirs, strict=True):
        if original.numel() == 0:
            continue
        wanted, got = original.double(), mine.double()
        finite = wanted.isfinite()
        if not torch.equal(finite, got.isfinite()):
            return float("inf")
        gap = torch.where(finite, (wanted - got).abs(), 0.0).max()
        size = torch.where(finite, wanted.abs(), 0.0).max()
        worst = max(worst, float(gap / size.clamp_min(1e-12)))
    return worst
