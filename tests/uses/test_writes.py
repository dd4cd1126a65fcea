"""Every way of writing to a weight, of every kind of layer that is packed, folded or joined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.optimize import DEFAULT

from .compare import Log
from .layers import KINDS, Kind
from .ways import at, ways_for

EVERY_WAY = {("linear", "0.weight"), ("conv2d_norm", "0.weight")}
STRIDE = 19
"""Of the other tensors, the default run takes each nineteenth way, another one for each tensor."""


def _cases() -> Iterator[Any]:
    number = 0
    for name, kind in KINDS.items():
        model = kind.build()
        for path in kind.targets:
            for way in ways_for(at(model, path)[2]):
                if name == "lstm" and way == "swap_tensors":
                    continue  # stock refuses: it holds weak references to these weights
                for when in ("before", "after"):
                    number += 1
                    often = when == "after" and (name, path) in EVERY_WAY
                    marks = () if often or number % STRIDE == 0 else pytest.mark.slow
                    identifier = f"{name}-{path}-{way}-{when}"
                    yield pytest.param(name, path, way, when, id=identifier, marks=marks)


def _written(kind: Kind, path: str, way_name: str, when: str) -> Callable[[Any, Log], None]:
    """Return the use: calls of the model, the write, calls, and the state at the end."""

    def use(model: Any, log: Log) -> None:
        x = kind.sample()
        way = ways_for(at(model, path)[2])[way_name]

        def call() -> None:
            with torch.no_grad():
                log(model(x))
            with torch.inference_mode():
                log(model(x).clone() if isinstance(model(x), torch.Tensor) else None)

        if when == "after":
            call()
            call()
        parts = way(model, path)
        if inspect.isgenerator(parts):
            for _ in parts:
                call()
        call()
        call()
        log(model.state_dict())
        log(sum(float(p.detach().double().sum()) for p in model.parameters()))

    return use


@pytest.mark.parametrize(("name", "path", "way", "when"), _cases())
def test_write(check: Callable[..., None], name: str, path: str, way: str, when: str) -> None:
    kind = KINDS[name]
    check(kind.build, _written(kind, path, way, when), kind.form, kind.sample)


@pytest.mark.parametrize("form", ["sample", "program"])
@pytest.mark.parametrize(
    "way",
    [
        *("copy_", "data_fill_", "data_assigned", "held_row", "new_parameter", "adamw_fused"),
        "swap_tensors",
    ],
)
@pytest.mark.parametrize("name", ["linear", "conv2d_norm", "gated", "normed", "lstm", "tied"])
def test_write_after_recording(check: Callable[..., None], name: str, way: str, form: str) -> None:
    if name == "lstm" and way == "swap_tensors":
        pytest.skip("stock refuses: it holds weak references to these weights")
    kind = KINDS[name]
    check(kind.build, _written(kind, kind.targets[0], way, "after"), form, kind.sample)


@pytest.mark.parametrize("name", ["conv1d_norm", "conv2d_norm", "linear_norm"])
@pytest.mark.parametrize("form", ["default", "sample"])
def test_update_of_batch_norm_statistics(check: Callable[..., None], name: str, form: str) -> None:
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        x = kind.sample()
        with torch.no_grad():
            log(model(x))
        torch.optim.swa_utils.update_bn([x, x * 2], model)
        log(model.training)
        with torch.no_grad():
            log(model.eval()(x))
            model.train()(x * 3)
            log(model.eval()(x), model(x), model.state_dict())

    check(kind.build, use, form, kind.sample)


@pytest.mark.parametrize("name", [*KINDS])
@pytest.mark.parametrize("made", ["before", "between"])
def test_undo_gives_the_users_own_parameters_back(
    settle: Callable[..., None], name: str, made: str
) -> None:
    """An optimizer that was made before `optimize(inplace=True)` still trains the model."""
    from .compare import _run, judge

    kind = KINDS[name]
    x = kind.sample()
    passes = {"sample_input": x, "passes": [*DEFAULT, kind.form]}
    options = passes if kind.form != "default" else {}
    stock, ours = Log(), Log()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind.build()

    def use(model: nn.Module, log: Log, optimize: bool) -> None:
        own = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if optimize:
            oxytorch.optimize(model, inplace=True, **options)
        with torch.no_grad():
            log(model(x), model(x))
            if made == "between":
                for p in model.parameters():
                    p.mul_(0.9)
            log(model(x))
        if optimize:
            oxytorch.undo(model)
        log([p is own[path] for path, p in model.named_parameters()])
        for _ in range(2):
            result = model(x)
            result = result[0] if isinstance(result, tuple) else result
            result.pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        log(model(x), model.state_dict())

    _run(build, lambda m, log: use(m, log, False), stock)
    _run(build, lambda m, log: use(m, log, True), ours)
    settle(judge(stock, ours))


@pytest.mark.parametrize("name", [*KINDS])
def test_training_the_optimized_model(check: Callable[..., None], name: str) -> None:
    """Fine-tuning: loss of the model's own answers, in evaluation and in training mode."""
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        x = kind.sample()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            model.train(step % 2 == 0)
            result = model(x)
            result = result[0] if isinstance(result, tuple) else result
            loss = result.pow(2).mean()
            loss.backward()
            log(loss, [p.grad for p in model.parameters()])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            log(model(x), model(x))

    check(kind.build, use, kind.form, kind.sample, tolerance=1e-4)
