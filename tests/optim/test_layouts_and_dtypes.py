"""Every rule over layouts of memory, dtypes and default dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizers import CASES, IDS, MEASURED, give_gradients, make, train
from torch import Tensor

STATE_DTYPES = [None, torch.float32, torch.bfloat16, torch.int8]
LAYOUTS = ["transposed", "channels last", "permuted", "a dimension of one"]


def _laid_out(layout: str, seed: int = 0) -> Tensor:
    """A dense float32 weight whose elements are not in the order of its dimensions."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        return torch.randn(37, 130, generator=generator).t()
    if layout == "channels last":
        weight = torch.randn(8, 5, 3, 3, generator=generator)
        return weight.contiguous(memory_format=torch.channels_last)
    if layout == "a dimension of one":
        return torch.randn(16, 1, 5, 5, generator=generator).permute(0, 3, 1, 2)
    return torch.randn(6, 7, 11, generator=generator).permute(1, 2, 0)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_layout_changes_no_value(
    name: str, options: dict[str, Any], split: bool, layout: str
) -> None:
    weight = _laid_out(layout)
    if split:
        weight = weight.bfloat16()
        options = {**options, "master_weights": "split"}
    assert not weight.is_contiguous()
    laid_out = make(name, [weight.clone()], **options)
    contiguous = make(name, [weight.clone(memory_format=torch.contiguous_format)], **options)
    (found,), (wanted,) = train(laid_out, 3), train(contiguous, 3)
    assert found.stride() == weight.stride()
    # Norms are sums in the order of memory.
    tolerance = 1e-5 if name in MEASURED else 0.0
    pairs = [(found, wanted)]
    if split:
        pairs.append((laid_out.master_weight(found), contiguous.master_weight(wanted)))
        pairs = pairs[1:] if name in MEASURED else pairs
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "Lamb"])
def test_a_layout_that_changes_on_the_way_takes_states_along(
    name: str, state_dtype: Any, layout: str
) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    weight = _laid_out(layout)
    optimizers = []
    for changes in (False, True):
        own = torch.nn.Parameter(weight.clone())
        optimizer = make(name, [own], state_dtype=state_dtype, **options)
        train(optimizer, 2)
        if changes:
            own.data = own.data.contiguous()
        train(optimizer, 2, 2)
        optimizers.append(optimizer)
    one, other = (optimizer.param_groups[0]["params"][0] for optimizer in optimizers)
    # What is rounded at random is rounded in another order.
    near = {None: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.int8: 0.02}[state_dtype]
    assert (one - other).norm() <= near * other.norm()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_dtype_takes_every_state_dtype(
    name: str, options: dict[str, Any], dtype: torch.dtype, state_dtype: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Small, so that steps are large beside what 16 bits round.
    start = torch.randn(70, 66, generator=generator).mul_(0.01).bfloat16()
    (wanted,) = train(make(name, [start.double()], **options), 3)
    optimizer = make(name, [start.to(dtype, copy=True)], state_dtype=state_dtype, **options)
    (found,) = train(optimizer, 3)
    assert found.dtype == dtype
    assert found.isfinite().all()
    moved, should = found.double() - start.double(), wanted - start.double()
    if name not in ("Lars", "Lamb") or dtype.itemsize > 2:
        assert (moved - should).norm() < 0.35 * should.norm()
    loaded = make(name, [start.to(dtype, copy=True)], state_dtype=state_dtype, **options)
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, 1)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_default_dtype_changes_nothing(
    name: str, options: dict[str, Any], split: bool, state_dtype: Any, default: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(70, 66, generator=generator)
    start = start.bfloat16() if split else start
    options = {**options, "state_dtype": state_dtype, "master_weights": "split" if split else None}
    weights = []
    for dtype in (torch.float32, default):
        with _default(dtype):
            optimizer = make(name, [start.clone()], **options)
            for step in range(3):
                with _default(torch.float32):
                    give_gradients(optimizer, step)
                optimizer.step()
            weights.append(optimizer.master_weight(optimizer.param_groups[0]["params"][0]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_gradients_that_do_not_read_as_they_are_stored(
    name: str, options: dict[str, Any], split: bool, clips: bool
) -> None:
    """Negated ones, and zeros without memory, as `torch.sgn` has them."""
    weight, numbers = torch.randn(16, 24), torch.randn(16, 24)
    if split:
        weight = weight.bfloat16()
        options = {**options, "master_weights": "split"}
    ours, plain = (make(name, [weight.clone()], **options) for _ in range(2))
    zeros = torch._efficientzerotensor((16, 24), dtype=weight.dtype)
    numbers = numbers.to(weight.dtype)
    turned = [numbers, torch._neg_view(numbers), zeros, numbers, zeros, torch._neg_view(numbers)]
    for gradient in turned:
        for optimizer, given in ((ours, gradient), (plain, torch.zeros_like(weight) + gradient)):
            (own,) = optimizer.param_groups[0]["params"]
            own.grad = given
            if clips:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
    (found,), (wanted,) = (each.param_groups[0]["params"] for each in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_an_empty_parameter_takes_a_gradient_of_any_strides(name: str) -> None:
    weights = [torch.zeros(3, 0), torch.randn(3, 4)]
    optimizer = make(name, [w.clone() for w in weights])
    empty, other = optimizer.param_groups[0]["params"]
    for _ in range(2):
        empty.grad = torch.zeros(()).expand(3, 0)
        other.grad = torch.ones(3, 4)
        optimizer.step()
    assert not torch.equal(other, weights[1])
