"""Clipping by the norm of all gradients, at once and in the next step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import LEVELS, Sweeps, give_gradients, make, weights
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_as_torch

from oxytorch import isa, optim, testing
from oxytorch.ops import global_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients_of(*dtypes: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Parameters with gradients of many shapes and the given dtypes, one without."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.zeros(5, requires_grad=True)]
    for dtype in dtypes:
        for shape in [(37, 29), (), (4097,), (0, 4), (3, 5, 7, 2)]:
            parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
            parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
            parameters.append(parameter)
    return parameters


def exact_norm(parameters: list[Tensor]) -> float:
    squares = [p.grad.double().square().sum().item() for p in parameters if p.grad is not None]
    return math.sqrt(math.fsum(squares))


@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["long", "short"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_and_norm_are_those_of_torch(dtype: torch.dtype, max_norm: float) -> None:
    ours = gradients_of(dtype)
    theirs = copy.deepcopy(ours)
    for one, other in zip(ours, theirs, strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    norm, expected = optim.clip_grad_norm_(ours, max_norm), clip_as_torch(theirs, max_norm)
    assert norm.dtype == expected.dtype and norm.shape == expected.shape
    torch.testing.assert_close(norm, expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            # torch rounds the norms of 16-bit gradients to 16 bits before it divides by them.
            torch.testing.assert_close(one.grad, other.grad)


def test_mixed_dtypes_have_one_norm() -> None:
    parameters = gradients_of(*DTYPES)
    expected = exact_norm(parameters)
    norm = optim.clip_grad_norm_(parameters, 2.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-7)
    assert exact_norm(parameters) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    parameters = gradients_of(torch.float32, scale=scale)
    expected = exact_norm(parameters)
    assert optim.clip_grad_norm_(parameters, math.inf).item() == pytest.approx(expected, rel=1e-7)


def test_norm_has_the_same_bits_at_every_level_and_number_of_threads() -> None:
    tensors = [p.grad for p in gradients_of(*DTYPES) if p.grad is not None]
    found = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for level in LEVELS:
                with isa.use(level), testing.settings(split=True):
                    found.add(global_norm(tensors).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_norm_of_nothing_is_zero() -> None:
    for tensors in ([], [torch.ones(0, 3)], [torch.ones(0, dtype=torch.bfloat16), torch.ones(0)]):
        assert torch.equal(global_norm(tensors), torch.zeros(()))


@pytest.mark.parametrize("norm_type", [1, 3.0, math.inf])
def test_other_norms_are_those_of_torch(norm_type: float) -> None:
    # torch has no infinity norm of an empty tensor.
    ours = [p for p in gradients_of(torch.float32) if p.numel()]
    theirs = [p for p in gradients_of(torch.float32) if p.numel()]
    norm = optim.clip_grad_norm_(ours, 1.0, norm_type)
    assert torch.equal(norm, clip_as_torch(theirs, 1.0, norm_type))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_sparse_and_float64_gradients_go_the_way_of_torch() -> None:
    def make_parameters(with_sparse: bool) -> list[Tensor]:
        table = torch.nn.Embedding(9, 4, sparse=True)
        table.weight.data.fill_(1.0)
        table(torch.tensor([1, 2, 2])).sum().backward()
        wide = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        wide.grad = torch.ones_like(wide)
        return [wide, table.weight] if with_sparse else [wide]

    for with_sparse in (False, True):
        found: list[object] = []
        for clip in (optim.clip_grad_norm_, clip_as_torch):
            try:
                found.append(clip(make_parameters(with_sparse), 1.0).item())
            except (RuntimeError, NotImplementedError) as error:
                found.append(type(error))
        assert found[0] == found[1]


def test_arguments_are_those_of_torch() -> None:
    single = gradients_of(torch.float32)[1]
    expected = exact_norm([single])
    assert optim.clip_grad_norm_(single, 1.0).item() == pytest.approx(expected)
    assert optim.clip_grad_norm_(iter(gradients_of(torch.float32)), 1.0).item() > 1.0
    assert optim.clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0).item() == 0.0
    assert optim.clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_if_asked(bad: float) -> None:
    ours, theirs = gradients_of(torch.float32), gradients_of(torch.float32)
    for parameters in (ours, theirs):
        parameters[1].grad[3, 4] = bad
    before = ours[1].grad.clone()
    optimizer = optim.SGD(ours, lr=0.1)
    for clip in (
        lambda: optim.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True),
        lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is non-finite"):
            clip()
    torch.testing.assert_close(ours[1].grad, before, rtol=0, atol=0, equal_nan=True)
    optim.clip_grad_norm_(ours, 1.0)
    clip_as_torch(theirs, 1.0)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


# In the next step


NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "Lamb", "Lars", "Adafactor"]


def pair(name: str, **options: Any) -> list[optim.FusedOptimizer]:
    return [make(name, weights(), **options) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=["down", "up"])
@pytest.mark.parametrize("name", NAMES)
def test_a_clipping_step_does_what_clipping_and_a_step_do(name: str, options: Any) -> None:
    ours, theirs = pair(name, **options)
    for step in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, step)
        before = [p.grad.clone() for p in ours.param_groups[0]["params"]]
        norm = ours.clip_grad_norm_(0.5)
        expected = clip_as_torch(theirs.param_groups[0]["params"], 0.5)
        torch.testing.assert_close(norm, expected)
        ours.step()
        theirs.step()
        pairs = zip(ours.param_groups[0]["params"], before, strict=True)
        assert all(torch.equal(p.grad, gradient) for p, gradient in pairs), "a gradient was written"
    both = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    for one, other in both:
        torch.testing.assert_close(one, other)


def test_only_one_sweep_over_gradients_comes_before_the_step() -> None:
    optimizer = make("AdamW", weights())
    give_gradients(optimizer, 0)
    optimizer.step()
    with Sweeps() as mode:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert mode.names == ["global_norm", "optimizer_step"]


def test_float64_and_sparse_parameters_are_clipped_in_the_step_too() -> None:
    ours = optim.SGD([torch.ones(4, dtype=torch.float64)], lr=0.1)
    ours.param_groups[0]["params"][0].grad = torch.full((4,), 3.0, dtype=torch.float64)
    assert ours.clip_grad_norm_(3.0).item() == pytest.approx(6.0)
    ours.step()
    torch.testing.assert_close(
        ours.param_groups[0]["params"][0], torch.full((4,), 0.85, dtype=torch.float64)
    )


def one_weight() -> tuple[optim.SGD, Tensor]:
    weight = torch.zeros(3, requires_grad=True)
    return optim.SGD([weight], lr=1.0), weight


def test_a_clipping_ends_with_its_step() -> None:
    optimizer, weight = one_weight()
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, 0.0, -0.8]))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-3.6, 0.0, -4.8]))


def test_the_last_call_counts_and_zero_grad_ends_it() -> None:
    optimizer, weight = one_weight()
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    optimizer.clip_grad_norm_(0.1)
    assert optimizer.clip_grad_norm_(2.5).item() == 5.0
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.5, 0.0, -2.0]))
    optimizer.clip_grad_norm_(0.1)
    optimizer.zero_grad()
    weight.grad = torch.tensor([0.0, 1.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.5, -1.0, -2.0]))


def test_gradients_of_a_later_backward_are_not_clipped() -> None:
    optimizer, weight = one_weight()
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    optimizer.clip_grad_norm_(1.0)
    weight.grad = torch.tensor([2.0, 2.0, 2.0])
    optimizer.step()
    assert weight.tolist() == [-2.0, -2.0, -2.0]


@pytest.mark.parametrize("change", [lambda g: g.add_(1.0), lambda g: g.mul_(2.0)])
def test_gradients_that_change_after_clipping_are_an_error(
    change: Callable[[Tensor], Tensor],
) -> None:
    optimizer, weight = one_weight()
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    optimizer.clip_grad_norm_(1.0)
    change(weight.grad)
    with pytest.raises(RuntimeError, match="SGD: gradients are not those that clip_grad_norm_ saw"):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0, 0.0]
    optimizer.step()
    assert weight.tolist() != [0.0, 0.0, 0.0], "the error ends the clipping"


def test_clipping_without_gradients_is_no_error() -> None:
    optimizer, weight = one_weight()
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0, 0.0]
