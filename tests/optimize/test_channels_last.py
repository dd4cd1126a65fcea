"""Pass `channels_last`: the order in memory stays within a call, and answers are the model's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.optimize import DEFAULT, PASSES
from oxytorch.optimize.passes.channels_last import OrderedForward

LAST = torch.channels_last


class Two(nn.Module):
    """Two convolutions, and what is returned of their result."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.ConvTranspose2d(8, 6, 3)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(self.second(torch.relu(self.first(x))))


def _erased(y: Tensor) -> Tensor:
    y.reshape(len(y), -1)[:, ::2] = 7
    return y


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda y: y,
    "dictionary": lambda y: {"image": y, "parts": (y.mean((2, 3)), [y + 1])},
    "pixels": lambda y: y.flatten(2),
    "first": lambda y: y[0],
    "tokens": lambda y: y.flatten(2).transpose(1, 2),
    "turned": lambda y: y.permute(0, 2, 3, 1),
    "view": lambda y: y.view(len(y), -1),
    "reshaped_and_written_to": _erased,
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "torchs": lambda x: x,
    "last": lambda x: x.contiguous(memory_format=LAST),
}


def _is_done(model: nn.Module) -> bool:
    return any(e.pass_name == "channels_last" for e in oxytorch.explain(model).applied)


@pytest.mark.parametrize(
    "passes", [["channels_last"], [*DEFAULT], [p for p in PASSES if p != "program"]]
)
@pytest.mark.parametrize("order", [*ORDERS])
@pytest.mark.parametrize("name", [*RETURNS])
def test_answers_and_their_order_are_the_models(name: str, order: str, passes: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Two(RETURNS[name]).eval(), torch.randn(2, 8, 6, 5)
    sample = ORDERS[order](x)
    if name in ("view", "reshaped_and_written_to") and order == "last":
        sample = x  # the model itself does not run, or does something else, with the other order
    optimized = oxytorch.optimize(model, sample_input=sample, passes=passes)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for given in (x, sample):
            with mode():
                found, wanted = optimized(given.clone()), model(given.clone())
                torch.testing.assert_close(found, wanted, check_stride=True)


def test_the_order_is_handed_from_one_convolution_to_the_next() -> None:
    model, x = Two(RETURNS["itself"]).eval(), torch.randn(2, 8, 6, 5)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["channels_last"])
    assert _is_done(optimized)
    strides = []
    optimized.first.register_forward_hook(lambda *call: strides.append(call[2].stride()))
    with torch.no_grad():
        optimized(x)
        optimized(ORDERS["last"](x))
        optimized.first(x)
    optimized(x)
    last, torchs = (240, 1, 40, 8), (240, 30, 5, 1)
    assert strides == [last, last, torchs, torchs]


@pytest.mark.parametrize(
    ("returns", "has_sample", "reason"),
    [("itself", False, "needs sample_input"), ("turned", True, "order in memory"),
     ("reshaped_and_written_to", True, "order in memory")],
)  # fmt: skip
def test_what_may_depend_on_the_order_is_left(returns: str, has_sample: bool, reason: str) -> None:
    model, x = Two(RETURNS[returns]).eval(), torch.randn(2, 8, 6, 5)
    sample = x if has_sample else None
    optimized = oxytorch.optimize(model, sample_input=sample, passes=["channels_last"])
    assert not _is_done(optimized)
    details = [e.detail for e in oxytorch.explain(optimized).entries]
    assert any(reason in detail for detail in details)
    assert optimized.first.weight.is_contiguous()


def test_one_image_without_a_batch() -> None:
    model, x = Two(RETURNS["itself"]).eval(), torch.randn(8, 6, 5)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["channels_last"])
    assert _is_done(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), check_stride=True)


def test_copies_compile_and_undo() -> None:
    model, x = Two(RETURNS["itself"]).eval(), torch.randn(2, 8, 6, 5)
    model.returns = torch.relu
    optimized = oxytorch.optimize(model, sample_input=x, passes=["channels_last"])
    assert isinstance(optimized.first.forward, OrderedForward)
    compiled = torch.compile(optimized, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = model(x)
        for made in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized)), compiled):
            torch.testing.assert_close(made(x), wanted, check_stride=True)
    oxytorch.undo(optimized)
    assert "forward" not in {**optimized.__dict__, **optimized.first.__dict__}
    assert optimized.first.weight.is_contiguous()
    torch.testing.assert_close(optimized(x), wanted)
