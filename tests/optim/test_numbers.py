"""Steps against torch's single-tensor path, the reference, the formula in float64, and float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import (
    CASES,
    IDS,
    LEVELS,
    STOCK,
    STOCK_IDS,
    assert_same_numbers,
    assert_same_state,
    give_gradients,
    make,
    train,
    weights,
)
from torch import Tensor

from oxytorch import isa
from oxytorch.ops.optimizer_step import formats, rules
from oxytorch.optim import executor

FORMATS = {
    "fp32": {},
    "fp32-bf16": {"state_dtype": torch.bfloat16},
    "fp32-int8": {"state_dtype": torch.int8},
    "split": {"master_weights": "split"},
    "split-bf16": {"master_weights": "split", "state_dtype": torch.bfloat16},
    "split-int8": {"master_weights": "split", "state_dtype": torch.int8},
    "bf16": {},
    "bf16-fp32": {"state_dtype": torch.float32},
    "fp16": {},
    "fp16-int8": {"state_dtype": torch.int8},
}


def _dtype(format_name: str) -> torch.dtype:
    first = format_name.split("-")[0]
    return {"fp32": torch.float32, "fp16": torch.float16}.get(first, torch.bfloat16)


def _exact_root(x: Tensor) -> Tensor:
    return rules.sqrt(x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_float32_is_torch_bit_for_bit_but_for_its_square_root(
    name: str, options: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = getattr(torch.optim, name)(weights(), lr=0.01, foreach=False, **options)
    ours = make(name, weights(), **options)
    steps = 100 if level == isa.active() else 5
    with monkeypatch.context() as patch:
        # MKL's square root, which torch takes, is a unit off here and there.
        patch.setattr(torch.Tensor, "sqrt", _exact_root)
        patch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(_exact_root(x)))
        train(theirs, steps)
    with isa.use(level):
        isa.forget_last_called()
        train(ours, steps)
        assert isa.last_called() == level
    for wanted, parameter in zip(
        *(o.param_groups[0]["params"] for o in (theirs, ours)), strict=True
    ):
        assert torch.equal(parameter, wanted)
        assert_same_state(ours.state[parameter], theirs.state[wanted])


@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_float32_is_within_two_units_of_torch_at_each_step(
    name: str, options: dict[str, Any]
) -> None:
    """Weights that are not much larger than their change show the error of torch's square root."""
    theirs = getattr(torch.optim, name)(weights(), lr=0.01, foreach=False, **options)
    ours = make(name, weights(), **options)
    for step in range(100):
        for optimizer in (theirs, ours):
            give_gradients(optimizer, step)
        before = [p.detach().clone() for p in theirs.param_groups[0]["params"]]
        theirs.step()
        ours.step()
        for old, wanted, parameter in zip(
            before, theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True
        ):
            if wanted.numel():
                change = (wanted - old).abs().max()
                is_large = wanted.abs() > 2 * change
                unit = torch.nextafter(wanted.abs(), torch.tensor(torch.inf)) - wanted.abs()
                error = (parameter - wanted).abs()
                assert (error[is_large] <= 2 * unit[is_large]).all()
                assert (error <= 4 * torch.finfo(torch.float32).eps * (wanted.abs() + change)).all()
            # The next step begins at the same place.
            parameter.copy_(wanted)
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_level_computes_the_bits_of_the_reference(
    name: str, options: dict[str, Any], format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def run() -> list[Tensor]:
        optimizer = make(
            name, [w.to(_dtype(format_name)) for w in weights()], **options, **FORMATS[format_name]
        )
        parameters = train(optimizer, 3)
        states = [value for p in parameters for value in optimizer.state[p].values()]
        return [p.detach() for p in parameters] + states

    with monkeypatch.context() as patch:
        patch.setattr(executor, "is_fused", lambda parameter: False)
        expected = run()
    for level in LEVELS:
        with isa.use(level):
            actual = run()
        assert_same_numbers(name, actual, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_split_is_float32_bit_for_bit(name: str, options: dict[str, Any], level: str) -> None:
    with isa.use(level):
        expected = train(make(name, weights(), **options), 20)
        halves = [formats.split(weight)[0] for weight in weights()]
        optimizer = make(name, halves, **options, master_weights="split")
        for half, weight in zip(halves, weights(), strict=True):
            optimizer.set_master_weight(half, weight)
        for parameter, wanted in zip(train(optimizer, 20), expected, strict=True):
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(optimizer.master_weight(parameter), wanted)


@pytest.mark.parametrize(
    ("name", "options"), [c for c in CASES if c[0] in ("Lamb", "Lars", "Lion")]
)
def test_formulas_that_torch_lacks_hold_in_float64(name: str, options: dict[str, Any]) -> None:
    ours = make(name, weights(), **options)
    exact = copy.deepcopy([w.double() for w in weights()])
    state: list[dict[str, Tensor]] = [{} for _ in exact]
    for step in range(10):
        give_gradients(ours, step)
        for parameter, weight, own in zip(
            ours.param_groups[0]["params"], exact, state, strict=True
        ):
            sign = -1.0 if options.get("maximize") else 1.0
            FORMULAS[name](weight, sign * parameter.grad.double(), own, step + 1, options)
        ours.step()
    for parameter, weight in zip(ours.param_groups[0]["params"], exact, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "options", [options for name, options in CASES if name == "Adafactor"], ids=str
)
def test_adafactor_is_near_torch(options: dict[str, Any], level: str) -> None:
    # torch divides by zero for an empty parameter.
    theirs = torch.optim.Adafactor(
        [w for w in weights() if w.numel()], lr=0.01, foreach=False, **options
    )
    ours = make("Adafactor", [w for w in weights() if w.numel()], **options)
    steps = 100 if level == isa.active() else 5
    wanted = train(theirs, steps)
    with isa.use(level):
        actual = train(ours, steps)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert ours.state[a].keys() == theirs.state[b].keys()
        for key, value in theirs.state[b].items():
            torch.testing.assert_close(ours.state[a][key], value, rtol=1e-4, atol=1e-6)


def _lion(p: Tensor, g: Tensor, s: dict[str, Tensor], t: int, o: dict[str, Any]) -> None:
    m = s.get("m", torch.zeros_like(p))
    p *= 1 - 0.01 * o.get("weight_decay", 0.0)
    p -= 0.01 * (0.9 * m + 0.1 * g).sign()
    s["m"] = 0.99 * m + 0.01 * g


def _lamb(p: Tensor, g: Tensor, s: dict[str, Tensor], t: int, o: dict[str, Any]) -> None:
    s["m"] = 0.9 * s.get("m", torch.zeros_like(p)) + 0.1 * g
    s["v"] = 0.999 * s.get("v", torch.zeros_like(p)) + 0.001 * g * g
    r = s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    r = r + o.get("weight_decay", 0.0) * p
    a, b = p.norm(), r.norm()
    p -= 0.01 * (a / b if a > 0 and b > 0 else 1.0) * r


def _lars(p: Tensor, g: Tensor, s: dict[str, Tensor], t: int, o: dict[str, Any]) -> None:
    decay, a, b = o.get("weight_decay", 0.0), p.norm(), g.norm()
    trust = 1e-3 * a / (b + decay * a + o.get("epsilon", 0.0)) if a > 0 and b > 0 else 1.0
    d = g + decay * p
    if "momentum" in o:
        d = o["momentum"] * s["m"] + d if "m" in s else d
        s["m"] = d
    p -= 0.01 * trust * d


FORMULAS = {"Lion": _lion, "Lamb": _lamb, "Lars": _lars}
