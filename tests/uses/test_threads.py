"""Threads that call one model with ever new shapes, beside others that optimize and run models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.optimize import DEFAULT
from threads import errors_in_threads

from .compare import Verdict
from .networks import NETWORKS, encoder, images

THREADS = 4


class Branching(nn.Module):
    """Python that depends on the shape, so that each new shape is another record."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 8:
            x = x * 2
        return self.n(x + torch.relu(self.l(x)))


def branching() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Branching() for _ in range(6)]).eval()


def _in_threads(works: list[Callable[[], None]]) -> list[str]:
    """Run all at once and return what they raised."""
    errors = errors_in_threads(lambda work: work(), works)
    return [f"{type(error).__name__}: {error}" for error in errors]


def _close(ours: torch.Tensor, stock: torch.Tensor) -> None:
    scale = float(stock.abs().max())
    error = float((ours - stock).abs().max())
    if ours.dtype != stock.dtype or error > 1e-5 * scale:
        raise ValueError(f"differs by {error / scale:.2g} of the largest value")


def _settled(settle: Callable[[Verdict], None], errors: list[str]) -> None:
    settle(Verdict("wrong", f"{len(errors)} errors, {errors[0]}") if errors else Verdict("right"))


def _calls(stock: nn.Module, ours: nn.Module, calls: int, seed: int) -> Callable[[], None]:
    """Calls of shapes that no other thread uses in this order."""

    def work() -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(calls):
            rows, columns = 1 + (i * 7 + seed) % 5, 1 + (i * 13 + seed * 3) % 40
            x = torch.randn(rows, columns, 12, generator=generator)
            with torch.no_grad():
                _close(ours(x), stock(x))

    return work


def _optimizing(build: Callable[[], nn.Module], sample: torch.Tensor, rounds: int) -> Any:
    def work() -> None:
        stock = build()
        for i in range(rounds):
            options = [{}, {"sample_input": sample}][i % 2]
            ours = oxytorch.optimize(copy.deepcopy(stock), **options)
            with torch.no_grad():
                _close(ours(sample), stock(sample))

    return work


@pytest.mark.parametrize("passes", ["default", "program"])
@pytest.mark.parametrize("sampled", [True, False])
def test_new_shapes_in_four_threads(
    settle: Callable[[Verdict], None], sampled: bool, passes: str
) -> None:
    stock = branching()
    sample = torch.randn(2, 5, 12)
    options: dict[str, Any] = {"sample_input": sample} if sampled else {}
    if passes == "program":
        options = {
            "sample_input": sample,
            "passes": [*DEFAULT, passes],
        }
    ours = oxytorch.optimize(copy.deepcopy(stock), **options)
    _settled(settle, _in_threads([_calls(stock, ours, 200, i) for i in range(THREADS)]))


def test_new_shapes_beside_threads_that_optimize_and_run_others(
    settle: Callable[[Verdict], None],
) -> None:
    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 5, 12))
    other = branching()
    works = [_calls(stock, ours, 200, i) for i in range(THREADS)]
    works.append(_calls(other, copy.deepcopy(other), 200, 9))
    for build, sample in NETWORKS.values():
        works.append(_optimizing(build, sample(), 6))
    _settled(settle, _in_threads(works))


@pytest.mark.parametrize("build", [encoder, images], ids=["encoder", "images"])
def test_optimizing_in_threads(
    settle: Callable[[Verdict], None], build: Callable[[], nn.Module]
) -> None:
    sample = dict(NETWORKS.values())[build]()
    _settled(settle, _in_threads([_optimizing(build, sample, 6) for _ in range(THREADS)]))


def test_stock_model_beside_capture(settle: Callable[[Verdict], None]) -> None:
    """Hooks, attributes and answers of a stock model while others optimize."""
    stock = branching()
    expected: dict[int, torch.Tensor] = {}
    x = [torch.randn(2, n, 12) for n in range(1, 30)]
    with torch.no_grad():
        for i, value in enumerate(x):
            expected[i] = stock(value)
    heard: list[int] = []
    stock[0].l.register_forward_hook(lambda m, a, out: heard.append(1))

    def run() -> None:
        for _ in range(8):
            for i, value in enumerate(x):
                with torch.no_grad():
                    _close(stock(value), expected[i])

    optimizing = [_optimizing(encoder, NETWORKS["encoder"][1](), 8) for _ in range(2)]
    errors = _in_threads([run, run, *optimizing])
    if not errors and len(heard) != 2 * 8 * len(x):
        errors = [f"{len(heard)} calls of the hook, expected {2 * 8 * len(x)}"]
    _settled(settle, errors)


def test_gradients_in_threads(settle: Callable[[Verdict], None]) -> None:
    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 5, 12))

    def work() -> None:
        for i in range(40):
            x = torch.randn(2, 1 + i % 20, 12)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            (ga,) = torch.autograd.grad(ours(a).pow(2).sum(), a)
            (gb,) = torch.autograd.grad(stock(b).pow(2).sum(), b)
            if float((ga - gb).abs().max()) > 3e-5 * float(gb.abs().max()):
                raise ValueError("other gradients")

    _settled(settle, _in_threads([work] * THREADS))


def test_modes_of_one_thread_do_not_reach_another(settle: Callable[[Verdict], None]) -> None:
    """One thread under autocast, one with gradients, one in inference mode, one plain."""
    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 5, 12))

    def under(mode: Callable[[], Any], requires_grad: bool, limit: float) -> Callable[[], None]:
        def work() -> None:
            for i in range(60):
                x = torch.randn(2, 1 + i % 20, 12)
                with mode():
                    found, expected = ours(x), stock(x)
                if found.dtype != expected.dtype:
                    raise ValueError(f"{found.dtype}, stock {expected.dtype}")
                if found.requires_grad is not requires_grad:
                    raise ValueError("other requires_grad")
                error = float((found.float() - expected.float()).detach().abs().max())
                if error > limit * float(expected.detach().abs().max()):
                    raise ValueError(f"differs by {error}")

        return work

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    works = [
        under(torch.no_grad, False, 1e-5),
        under(torch.inference_mode, False, 1e-5),
        under(torch.enable_grad, True, 1e-5),
        under(autocast, True, 3e-2),
    ]
    _settled(settle, _in_threads(works))


def test_weights_written_between_rounds_of_threads(settle: Callable[[Verdict], None]) -> None:
    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 5, 12))
    errors: list[str] = []
    for factor in (0.9, 1.1, 0.5):
        with torch.no_grad():
            for one, other in zip(stock.parameters(), ours.parameters(), strict=True):
                one.mul_(factor)
                other.mul_(factor)
        errors += _in_threads([_calls(stock, ours, 20, i) for i in range(THREADS)])
    _settled(settle, errors)


def test_copies_and_pickles_in_threads(settle: Callable[[Verdict], None]) -> None:
    import pickle

    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock), sample_input=torch.randn(2, 5, 12))
    x = torch.randn(2, 5, 12)

    def work() -> None:
        for i in range(5):
            other = copy.deepcopy(ours) if i % 2 else pickle.loads(pickle.dumps(ours))
            with torch.no_grad():
                _close(other(x), stock(x))
            oxytorch.undo(other)
            with torch.no_grad():
                _close(other(x), stock(x))

    works = [work] * 2 + [_calls(stock, ours, 60, i) for i in range(2)]
    _settled(settle, _in_threads(works))


def test_thread_pool_and_futures(settle: Callable[[Verdict], None]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    stock = branching()
    ours = oxytorch.optimize(copy.deepcopy(stock))
    inputs = [torch.randn(2, 1 + i % 33, 12) for i in range(100)]

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    with torch.no_grad():
        expected = [stock(x) for x in inputs]
    errors = []
    with ThreadPoolExecutor(4) as pool:
        for future, value in zip(
            [pool.submit(call, ours, x) for x in inputs], expected, strict=True
        ):
            try:
                _close(future.result(60), value)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    _settled(settle, errors)
