"""Calls with arguments that a function does not have: the error says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.quantization import autotune, convert, prepare
from oxytorch.rewriting import predecessor

MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "optimize": (oxytorch.optimize, predecessor.OPTIMIZE | predecessor.OF_ANOTHER),
    "llm.optimize": (oxytorch.llm.optimize, predecessor.LLM_OPTIMIZE),
    "quantize": (oxytorch.quantize, predecessor.QUANTIZE),
    "prepare": (prepare, predecessor.PREPARE),
    "convert": (convert, predecessor.CONVERT),
    "autotune": (autotune, predecessor.AUTOTUNE),
}


@pytest.mark.parametrize(
    ("name", "keyword"), [(name, each) for name, (_, ways) in FUNCTIONS.items() for each in ways]
)
def test_keyword_of_the_predecessor_names_our_way(name: str, keyword: str) -> None:
    function, ways = FUNCTIONS[name]
    expected = f"{name}: {keyword} is an argument of intel_extension_for_pytorch; {ways[keyword]}"
    with pytest.raises(TypeError, match=re.escape(expected)):
        function(MODEL, **{keyword: None})


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no argument is called sample_inputs; did you mean sample"):
        oxytorch.optimize(MODEL, sample_inputs=torch.ones(1, 8))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="called zz; there are model, optimizer, dtype"):
        oxytorch.optimize(MODEL, zz=1)  # type: ignore[call-overload]


def test_positional_arguments_name_those_to_give_by_name() -> None:
    with pytest.raises(TypeError, match=r"most 1 .*got 2; give the others by name: .*dtype"):
        oxytorch.optimize(MODEL, torch.bfloat16)  # type: ignore[call-overload]


def test_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="prepare: missing a required argument: 'example_inputs'"):
        prepare(MODEL, None)  # type: ignore[call-arg]
