"""Calls that become programs give what the model's own code gives outside of recordings.

Torch's attention layers take other ways where somebody looks on at functions, as recordings do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

MASK = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)


class Encoded(nn.Module):
    """An encoder of torch's between layers of the model's own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(16, 16), part, nn.Linear(16, 4)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Any:
        x = self.first(x)
        if isinstance(self.part, nn.MultiheadAttention):
            x = self.part(x, x, x, padding, need_weights=False, attn_mask=mask)[0]
        else:
            x = self.part(x, mask, src_key_padding_mask=padding)
        return self.last(x)


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(_layer(), 2),
    "encoder_not_nested": lambda: nn.TransformerEncoder(_layer(), 2, enable_nested_tensor=False),
    "layer": _layer,
    "attention": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
}


@pytest.mark.parametrize("part", [*PARTS])
def test_every_call_gives_what_the_model_gives(part: str) -> None:
    torch.manual_seed(0)
    stock = Encoded(PARTS[part]()).eval()
    model = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 6, 16), graph=True)
    assert "1 x one program for" in str(oxytorch.explain(model))
    none = torch.zeros_like(MASK)
    forms = [(), (MASK,), (none,), (None, CAUSAL), (MASK, CAUSAL), (none, CAUSAL)]
    with torch.no_grad():
        for masks in (*forms, *forms):
            for size in (2, 2, 2, 1, 1):
                x = torch.randn(size, 6, 16)
                own = [m[:size] if m is MASK or m is none else m for m in masks]
                wanted = stock(x, *own)
                found = model(x, *own)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
                assert found.stride() == wanted.stride()


def test_values_of_a_fast_path_alone_are_kept() -> None:
    """Of a row that sees nothing torch makes NaN in its fast path, and zeros elsewhere."""
    torch.manual_seed(0)
    stock = Encoded(PARTS["attention"]()).eval()
    x, nothing = torch.randn(2, 6, 16), MASK.clone()
    nothing[1] = True
    model = oxytorch.optimize(copy.deepcopy(stock), sample_input=(x, nothing), graph=True)
    assert "gives other values while it is recorded" in str(oxytorch.explain(model))
    with torch.no_grad():
        assert stock(x, nothing)[1].isnan().all()
        for _ in range(3):
            torch.testing.assert_close(model(x, nothing), stock(x, nothing), equal_nan=True)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = x.nonzero()
        return self.layer(x) + places.shape[0]


def test_the_line_that_cannot_be_recorded_is_named() -> None:
    model = oxytorch.optimize(Reads().eval(), sample_input=torch.randn(2, 4), graph=True)
    line = Reads.forward.__code__.co_firstlineno + 1
    found = str(oxytorch.explain(model))
    assert "the size of aten.nonzero.default's result depends on values" in found
    assert f"at test_program_fast_paths.py:{line}" in found


def test_an_operator_that_gives_no_tensor_is_named() -> None:
    stock = Encoded(PARTS["encoder"]()).eval()
    model = oxytorch.optimize(stock, sample_input=(torch.randn(2, 6, 16), MASK), graph=True)
    found = str(oxytorch.explain(model))
    assert "aten._nested_tensor_from_mask_left_aligned.default returns a bool" in found
    assert "at test_program_fast_paths.py:" in found


def test_without_nested_tensors_a_padding_mask_is_no_hindrance() -> None:
    stock = Encoded(PARTS["encoder_not_nested"]()).eval()
    model = oxytorch.optimize(stock, sample_input=(torch.randn(2, 6, 16), MASK), graph=True)
    assert "1 x one program for" in str(oxytorch.explain(model))
