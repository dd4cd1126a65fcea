"""What code asks of its input and of objects, where no one sees the question: no program."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch


class Held:
    """Something that may be referred to weakly."""


HELD = Held()
FACTORS: collections.defaultdict[str, float] = collections.defaultdict(lambda: 1.0)


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.randn(8, 64)


def _later() -> Tensor:
    FACTORS.default_factory = lambda: 2.0
    return torch.randn(8, 64)


def _referred_to() -> Tensor:
    HELD.reference = weakref.ref(HELD)  # type: ignore[attr-defined]
    return torch.randn(8, 64)


QUESTIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Tensor]]] = {
    "is_inference": (lambda x: x.is_inference(), _inference_tensor),
    "torch.is_inference": (lambda x: torch.is_inference(x), _inference_tensor),
    "_base": (lambda x: x._base is not None, lambda: torch.randn(20, 64)[4:12]),
    "_is_view": (lambda x: x._is_view(), lambda: torch.randn(20, 64)[4:12]),
    "is_shared": (lambda x: x.is_shared(), lambda: torch.randn(8, 64).share_memory_()),
    "default_factory": (lambda x: FACTORS.default_factory() > 1, _later),  # type: ignore[misc]
    "getweakrefcount": (lambda x: weakref.getweakrefcount(HELD) > 0, _referred_to),
}


class Asks(nn.Module):
    def __init__(self, question: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if self.question(x) else 1.0
        return self.body(x) * scale


@pytest.mark.usefixtures("pack_small_layers")
@pytest.mark.parametrize("passes", [None, ["program"]])
@pytest.mark.parametrize("name", QUESTIONS)
def test_answer_of_later_calls_counts(name: str, passes: list[str] | None) -> None:
    question, later = QUESTIONS[name]
    FACTORS.default_factory = lambda: 1.0
    HELD.__dict__.clear()
    model, x = Asks(question).eval(), torch.randn(8, 64)
    more = {} if passes is None else {"passes": passes}
    with torch.no_grad():
        ours = oxytorch.optimize(model, sample_input=x, graph=True, **more)
        ours(x)
        given = later()
        for _ in range(2):
            torch.testing.assert_close(ours(given), model(given), rtol=1e-4, atol=1e-4)
