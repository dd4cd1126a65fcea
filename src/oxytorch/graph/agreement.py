"""How far the outputs of two runs lie apart, and how far they may: all tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of a whole model from the original, as a fraction of the largest value of the original's output,
by the narrowest dtype that is computed in: rounding that many layers amplify."""

RECOGNIZED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of a module from the formula that its operators are, relative and absolute: sums in another
order."""

FUSED_LAYER = 1e-5
"""Of a fused decoder layer from the layer itself, both in float32 on random values, as a fraction
of the largest value: a wrong formula is off by 1e-3 and more."""

LOGITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of a whole step of a language model from the model's own code, as a fraction of the largest."""

LOGITS_MULTIPLE = {None: 1.0, "int8": 8.0}
"""What `LOGITS` is multiplied with by what activations are rounded to: sums that differ by rounding
to bfloat16 may become neighbouring steps of 255, which are about eight times as far apart."""

JOINED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of the rows of several calls at once from those of the calls alone, as a fraction of the largest
value: products of other sizes sum in another order."""

CONVERTED = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of an output of a converted program from that of the exported one, by the output's dtype, as a
fraction of the largest value: sums in another order, which layers amplify."""

CONVERTED_NARROW = 5e-2
"""The same in other dtypes, which round more coarsely."""

PACKED_LAYER = 0.02
"""Of a packed decoder layer from the layer with its plain weights, both in the result's dtype, as a
fraction of the output's norm. With weights of few bits `ROUNDED_LAYER` takes its place. A layer
that differs by more, and the first of each structure with weights of few bits, is compared with its
own code on the same rounded weights (`SAME_WEIGHTS`)."""

ROUNDED_LAYER = 1.46
"""How many times the rounding error of one product a layer with rounded weights may differ from the
layer with its plain weights, as a fraction of what the layer adds to its input: two or three
products follow each other. The error of a product follows from the step of its format
(`WeightFormat.rounding_error`). The rounding of the result to its dtype comes on top."""

SAME_WEIGHTS = {False: 0.02, True: 0.05}
"""Of a packed layer from its own code in float32 on the same rounded weights, as a fraction of what
the layer adds to its input, by whether weights are of few bits; or `SAME_WEIGHTS_MULTIPLE`, where
that is more."""

SAME_WEIGHTS_MULTIPLE = 3.0
"""How many times the error of its own code in the result's dtype a packed layer may err there. Both
round their activations, where a packed product does."""

COARSE_LAYER = 0.5
"""The most that it may err there, as a fraction of the output's norm: its own code gives such a
layer badly in the result's dtype."""


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All floating tensors in an output, in order; containers and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield from floating_tensors([*value.unbind()])
        elif value.is_floating_point():
            yield value if value.layout == torch.strided else value.to_dense()
    elif isinstance(value, dict) or hasattr(value, "keys"):
        for key in value.keys():  # noqa: SIM118 (transformers' outputs are no plain dicts)
            yield from floating_tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floating_tensors(item)


def difference(expected: Any, found: Any) -> float:
    """Largest difference of any output as a fraction of that output's largest value."""
    ours, theirs = [*floating_tensors(found)], [*floating_tensors(expected)]
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
