"""What makes a graph of TorchScript faster, for calls of the form of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...graph.errors import CaptureError
from .guard import branch, condition
from .metas import Metas
from .rewrite import Outcome, rewrite
from .types import operator_of

_ATTEMPTS = ((True, True), (True, False), (False, False))
"""What sizes are taken to vary: all, also where the sample has 1 first; all others; none."""


def fuse(graph: Any, samples: Sequence[Any], layouts: bool) -> Outcome:
    """Change the graph of a frozen module, for calls with inputs like the samples in all but sizes.

    For other calls it runs as it was. Where nothing was found to change, it stays as it is.
    layouts: whether convolutions may be given another order in memory.

    Raises CaptureError where nothing can be said of its values.
    """
    changed = graph.copy()
    torch._C._jit_pass_remove_mutation(changed)
    _check(changed)
    metas = _known(changed, samples)
    outcome = rewrite(changed, metas, layouts)
    if outcome.applied:
        _, *inputs = graph.inputs()
        branch(graph, changed, condition(inputs, samples, metas))
    return outcome


def _known(graph: Any, samples: Sequence[Any]) -> Metas:
    """What is known of the values, for as many sizes as possible."""
    _, *inputs = graph.inputs()
    best: Metas | None = None
    for dynamic, varied in _ATTEMPTS:
        metas = Metas(dynamic, varied)
        for place, (value, sample) in enumerate(zip(inputs, samples, strict=True)):
            metas.given(place, value, sample)
        metas.run(graph)
        if best is None or len(metas.reasons) < len(best.reasons):
            best = metas
        if not best.reasons:
            break
    assert best is not None
    return best


def _check(block: Any) -> None:
    for node in block.nodes():
        if "mkldnn" in node.kind().lower():
            raise CaptureError("torch.jit.optimize_for_inference was here before")
        func = operator_of(node)
        if func is not None and torch.Tag.inplace_view in func.tags:
            raise CaptureError(f"{node.kind()} changes the form of a tensor in place")
        for each in node.blocks():
            _check(each)
