"""Checkpoints between torch's classes and ours, and what programs do with optimizers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from optimizers import (
    CASES,
    IDS,
    OPTIONS,
    STOCK,
    STOCK_IDS,
    assert_same_state,
    give_gradients,
    make,
    train,
    weights,
)
from torch import Tensor

from oxytorch import optim

SMALL = {
    "bf16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": torch.int8},
    "split": {"master_weights": "split"},
    "split-int8": {"master_weights": "split", "state_dtype": torch.int8},
}


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The checkpoint as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_training_continues_identically_both_ways(name: str, options: dict[str, Any]) -> None:
    stock = getattr(torch.optim, name)
    theirs = stock(weights(), lr=0.01, foreach=False, **options)
    train(theirs, 3)
    ours = make(name, _parameters(theirs), **options)
    ours.load_state_dict(_saved(theirs))
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    train(ours, 3, first=3)
    back = stock(_parameters(ours), lr=0.01, foreach=False, **options)
    back.load_state_dict(_saved(ours))
    for parameter, copied in zip(
        ours.param_groups[0]["params"], back.param_groups[0]["params"], strict=True
    ):
        assert_same_state(ours.state[parameter], back.state[copied])
    for theirs_end, ours_end in zip(train(back, 3, first=6), train(ours, 3, first=6), strict=True):
        torch.testing.assert_close(ours_end, theirs_end, rtol=2e-6, atol=1e-6)


def _trained(name: str, options: dict[str, Any], format_name: str) -> Any:
    dtype = torch.bfloat16 if "split" in format_name else torch.float32
    optimizer = make(name, [w.to(dtype) for w in weights()], **options, **SMALL[format_name])
    train(optimizer, 3)
    return optimizer


@pytest.mark.parametrize("format_name", SMALL)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_small_formats_continue_bit_for_bit_from_their_checkpoint(
    name: str, options: dict[str, Any], format_name: str
) -> None:
    one = _trained(name, options, format_name)
    other = make(name, _parameters(one), **options, **SMALL[format_name])
    other.load_state_dict(_saved(one))
    for a, b in zip(train(one, 3, first=3), train(other, 3, first=3), strict=True):
        assert torch.equal(a, b)
        assert_same_state(other.state[b], one.state[a])


@pytest.mark.parametrize("format_name", SMALL)
@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_checkpoints_of_small_formats_are_torchs(
    name: str, options: dict[str, Any], format_name: str
) -> None:
    ours = _trained(name, options, format_name)
    theirs = getattr(torch.optim, name)(_parameters(ours), lr=0.01, **options)
    train(theirs, 1)
    saved = _saved(ours)
    for index, state in theirs.state_dict()["state"].items():
        wanted = {key for key, value in state.items() if value is not None}
        # Random rounding counts steps where torch does not.
        assert saved["state"][index].keys() - {"low_half", "step"} == wanted - {"step"}
        for key in wanted - {"step"}:
            assert saved["state"][index][key].dtype == torch.float32
    theirs.load_state_dict(saved)
    train(theirs, 1, first=3)


def test_loading_keeps_the_formats_that_are_in_use() -> None:
    wide = make("AdamW", weights())
    train(wide, 2)
    narrow = make("AdamW", _parameters(wide), state_dtype=torch.int8)
    narrow.load_state_dict(_saved(wide))
    codes = [s["exp_avg"].dtype for s in narrow.state.values() if s["exp_avg"].numel() >= 4096]
    assert codes == [torch.int8]
    assert narrow.memory_report()["total"] < wide.memory_report()["total"]


@pytest.mark.parametrize("name", OPTIONS)
def test_optimizers_can_be_copied_and_pickled(name: str) -> None:
    optimizer = make(name, weights(), state_dtype=torch.bfloat16)
    train(optimizer, 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    wanted = train(optimizer, 2, first=2)
    for other in copies:
        for a, b in zip(train(other, 2, first=2), wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_schedulers_and_tensor_rates_work(name: str, options: dict[str, Any]) -> None:
    def run(lr: float | Tensor) -> list[Tensor]:
        optimizer = getattr(optim, name)([w for w in weights() if w.numel()], lr=lr, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=8, cycle_momentum=False
        )
        for step in range(6):
            give_gradients(optimizer, step)
            optimizer.step()
            scheduler.step()
        return list(optimizer.param_groups[0]["params"])

    for a, b in zip(run(0.01), run(torch.tensor(0.01)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.equal(run(0.01)[0], weights()[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_closures_and_hooks_are_called(name: str) -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = make(name, [parameter])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == ["before", "closure", "after"]
    assert not torch.equal(parameter, torch.ones(3))


def test_groups_have_their_own_rates_and_formats() -> None:
    narrow = torch.randn(5000).bfloat16()
    wide, late = torch.randn(5000), torch.randn(5)
    optimizer = optim.AdamW(
        [
            {"params": [narrow], "master_weights": "split", "state_dtype": torch.int8},
            {"params": [wide], "lr": 0.0, "weight_decay": 0.0},
        ]
    )
    optimizer.add_param_group({"params": [late], "state_dtype": torch.bfloat16})
    before = wide.clone()
    train(optimizer, 2)
    assert torch.equal(wide, before)
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in (narrow, wide, late)]
    assert dtypes == [torch.int8, torch.float32, torch.bfloat16]
    assert optimizer.low_bits(narrow) is not None
    assert optimizer.low_bits(wide) is None


LAZINESS = """
import sys
import torch
from oxytorch import optim

weight = torch.ones(5, requires_grad=True)
optimizer = optim.AdamW([weight])
optimizer.add_param_group({"params": [torch.ones(3)], "lr": 0.5})
weight.grad = torch.ones(5)
optimizer.step()
optimizer.zero_grad()
assert weight.grad is None and len(optimizer.param_groups) == 2
assert "torch._dynamo" not in sys.modules
torch.optim.AdamW([torch.ones(5)])
assert "torch._dynamo" in sys.modules, "torch has become lazy itself"
"""


def test_steps_do_not_import_the_compiler_of_torch() -> None:
    subprocess.run([sys.executable, "-c", LAZINESS], check=True)


WRAPPED = """
import functools
import torch
from oxytorch import optim

own, called = torch.optim.Optimizer.zero_grad, []

@functools.wraps(own)
def zero_grad(self, set_to_none=True):
    called.append(set_to_none)
    own(self, set_to_none)

torch.optim.Optimizer.zero_grad = zero_grad
optim.AdamW([torch.ones(5)]).zero_grad(set_to_none=False)
assert called == [False]
"""


def test_wrappers_of_others_are_called() -> None:
    subprocess.run([sys.executable, "-c", WRAPPED], check=True)
