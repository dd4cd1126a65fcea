"""First steps that are left out, checkpoints after gradients of every layout, hooks that end."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from optimizers import CASES, IDS, give_gradients, make, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oxytorch import optim


def _left_out(optimizer: Any) -> None:
    """A step as a GradScaler makes it, which leaves it to the optimizer to do nothing."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    give_gradients(optimizer, 99)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
def test_first_steps_that_are_left_out_change_nothing(
    name: str, own: dict[str, Any], split: bool, state_dtype: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(70, 66, generator=generator), torch.randn(9, generator=generator)]
    starts = [start.bfloat16() if split else start for start in starts]
    options = {**own, "state_dtype": state_dtype, "master_weights": "split" if split else None}
    found, wanted = (make(name, [s.clone() for s in starts], **options) for _ in range(2))
    for _ in range(2):
        _left_out(found)
    for one, other in zip(train(found, 3), train(wanted, 3), strict=True):
        assert torch.equal(found.master_weight(one), wanted.master_weight(other))


class _Reads(TorchDispatchMode):
    """Counts the values of tensors that Python reads, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
def test_steps_under_a_scaler_read_no_values(
    name: str, own: dict[str, Any], state_dtype: Any
) -> None:
    if name == "Adafactor":
        pytest.skip("on a processor torch moves its factors; test_gpu_cuda.py looks at GPUs")
    optimizer = make(name, [torch.ones(5, 4), torch.ones(3)], **own, state_dtype=state_dtype)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with _Reads() as reads:
        for step in range(3):
            give_gradients(optimizer, step)
            optimizer.step()
    # Dampened momentum begins otherwise in a first step that is left out, which has to be known.
    assert reads.count == (1 if own.get("dampening") else 0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
def test_a_parameter_whose_first_step_is_left_out_begins_later(
    name: str, own: dict[str, Any], split: bool
) -> None:
    own = {**own, "master_weights": "split" if split else None}
    starts = [torch.ones(5, 4), torch.ones(3)]
    starts = [start.bfloat16() if split else start for start in starts]
    found, wanted = (make(name, [s.clone() for s in starts], **own) for _ in range(2))
    for optimizer in (found, wanted):
        give_gradients(optimizer, 0)
        optimizer.param_groups[0]["params"][1].grad = None
        optimizer.step()
    _left_out(found)
    for one, other in zip(train(found, 2, 1), train(wanted, 2, 1), strict=True):
        assert torch.equal(found.master_weight(one), wanted.master_weight(other))


def _gradient(layout: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(like.shape, generator=generator)
    if layout == "sparse":
        values[1:] = 0
        return values.to_sparse()
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "expanded":
        return values[:1].expand_as(values)
    return values


LAYOUTS = ["strided", "transposed", "expanded", "sparse"]


@pytest.mark.parametrize("later", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
def test_own_checkpoints_load_after_gradients_of_every_layout(
    name: str, own: dict[str, Any], first: str, later: str
) -> None:
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    takes_sparse = name in ("SGD", "Adagrad") and not own.get("weight_decay")
    if "sparse" in (first, later) and not takes_sparse:
        optimizer = make(name, [start.clone()], **own)
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = _gradient("sparse", parameter)
        with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
            optimizer.step()
        assert torch.equal(parameter, start)
        return
    if own.get("nesterov") and first != later and "sparse" in (first, later):
        pytest.skip("torch adds no dense momentum to a sparse gradient")
    pair = [make(name, [start.clone()], **own) for _ in range(2)]
    parameters = [optimizer.param_groups[0]["params"][0] for optimizer in pair]
    for layout in (first, later, first):
        for optimizer, parameter in zip(pair, parameters, strict=True):
            parameter.grad = _gradient(layout, parameter)
            optimizer.step()
        saved = copy.deepcopy(pair[0].state_dict())
        pair[0] = make(name, [parameters[0]], **own)
        pair[0].load_state_dict(saved)
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=0)


def test_sparse_gradients_stand_beside_split_weights() -> None:
    words, weight = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3).bfloat16())
    optimizer = optim.SGD(
        [{"params": [words]}, {"params": [weight], "master_weights": "split"}], lr=0.1
    )
    words.grad, weight.grad = torch.ones(4, 3).to_sparse(), torch.ones(4, 3).bfloat16()
    optimizer.step()
    torch.testing.assert_close(words.detach(), optimizer.master_weight(weight))
    mixed = optim.SGD([words, nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    mixed.param_groups[0]["params"][1].grad = torch.ones(2)
    mixed.step()
    assert mixed.param_groups[0]["params"][1].tolist() == pytest.approx([0.9, 0.9])


def test_hooks_of_an_optimizer_that_is_gone_are_gone() -> None:
    layer = nn.Linear(3, 3)
    for _ in range(3):
        optimizer = optim.AdamW(layer.parameters(), release_gradients=True)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert all(len(p._post_accumulate_grad_hooks or {}) == 1 for p in layer.parameters())
        del optimizer
        gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optim.clip_grad_norm_(layer.parameters(), 1.0)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("unscales", ["before", "after", "never"])
def test_clipping_of_gradients_that_change_afterwards(accumulates: bool, unscales: str) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optim.AdamW(layer.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(layer(torch.ones(2, 3)).sum()).backward()
    if unscales == "before":
        scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(0.1, scaler=scaler)
    if unscales == "after":
        scaler.unscale_(optimizer)
    before = layer.weight.detach().clone()
    if accumulates:
        layer(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="gradients are not those that clip_grad_norm_ saw"):
            scaler.step(optimizer)
        assert torch.equal(layer.weight, before)
    else:
        scaler.step(optimizer)
        assert not torch.equal(layer.weight, before)


def test_lightning_may_clip_between_unscaling_and_the_step() -> None:
    # It asks for this attribute, with and without a scaler.
    layer = nn.Linear(3, 3)
    optimizer: Any = optim.AdamW(layer.parameters())
    assert not optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    scaler.step(optimizer)
    assert optim.AdamW(nn.Linear(2, 2).half().parameters())._step_supports_amp_scaling
