"""Models of the zoo mean the same at four sizes under `optimize(graph=True)`, which share programs.

The default run takes one model in thirty; `SLOW=1` in the environment takes all.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from checks import CASES, call
from forms import assert_alike
from torch import Tensor
from torch.utils import _pytree as pytree

import oxytorch

EVERY = 1 if os.environ.get("SLOW") else 30
"""One in so many models is in the default run."""
LEFT_OUT = frozenset(["levit", "recommender_tables"])
"""levit: with random weights float32 and float64 differ as much. recommender_tables: its offsets of
bags are values that have to fit their number."""


def _parameters() -> list[Any]:
    names = [name for name in sorted(CASES) if name not in LEFT_OUT]
    return [
        pytest.param(name, marks=[] if index % EVERY == 7 % EVERY else [pytest.mark.slow])
        for index, name in enumerate(names)
    ]


def _further(first: Any, second: Any, steps: int) -> Any:
    """An input whose sizes differ from the second's as these do from the first's, `steps` times."""

    def grown(a: Any, b: Any) -> Any:
        if not isinstance(b, Tensor) or a.shape == b.shape:
            return b
        shape = [max(2, m + steps * (m - n)) for n, m in zip(a.shape, b.shape, strict=True)]
        place = torch.arange(torch.Size(shape).numel()) % b.numel()
        return b.flatten()[place].view(shape)

    return pytree.tree_map(grown, first, second)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _parameters())
def test_a_program_of_several_sizes_means_what_the_model_means(name: str) -> None:
    case = CASES[name]()
    model = case.model.eval()
    optimized = oxytorch.optimize(model, sample_input=case.first, passes=["program"])
    further = [_further(case.first, case.second, steps) for steps in (1, 2)]
    for round_ in range(2):
        for inputs in (case.second, *further, case.first):
            try:
                expected = call(model, inputs)
            except Exception:
                continue  # a size that the model does not take
            for _ in range(3):
                found = call(optimized, inputs)
                assert_alike(found, expected)
        if round_ == 0:
            with torch.no_grad():
                for each in (model, optimized):
                    for parameter in each.parameters():
                        if parameter.is_floating_point():
                            parameter.mul_(1.01)
