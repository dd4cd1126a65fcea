"""Steps on a GPU: the bits of the processor's kernels, and all that may happen between two steps.

Without a GPU `test_gpu_interpreted.py` runs a part of them in Triton's interpreter.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from gpu_device import (
    DEVICE,
    FORMATS,
    HAS_GPU,
    IS_INTERPRETED,
    NEEDS_DEVICE,
    both,
    give_gradients,
    on_device,
    on_processor,
    same_optimizers,
    train,
)
from optimizers import CASES, IDS, MEASURED, STOCK, STOCK_IDS, make, weights
from torch import Tensor

from oxytorch import optim
from oxytorch.optim.gpu import step_cache

pytestmark = [NEEDS_DEVICE, pytest.mark.usefixtures("device")]
needs_cuda = pytest.mark.skipif(IS_INTERPRETED or not HAS_GPU, reason="needs an NVIDIA GPU")

FEW = {"AdamW-plain", "SGD-momentum-nesterov", "Lamb-plain", "Adafactor-plain", "Lion-plain"}
STEPS = [
    pytest.param(name, options, kind, id=f"{key}-{kind}")
    for key, (name, options) in zip(IDS, CASES, strict=True)
    for kind in FORMATS
    if not IS_INTERPRETED or (key in FEW and kind in ("fp32", "split-int8"))
]


@pytest.mark.parametrize(("name", "options", "kind"), STEPS)
def test_steps_are_those_of_the_processor(name: str, options: dict[str, Any], kind: str) -> None:
    ours, theirs = both(name, kind, **options)
    steps = 2 if IS_INTERPRETED else 10
    train(ours, steps)
    with on_processor():
        train(theirs, steps)
    # Norms are summed in another order.
    same_optimizers(ours, theirs, exactly=name not in MEASURED)
    assert len(ours._step_caches) == 1


@needs_cuda
@pytest.mark.parametrize("kind", ["fp32", "split-int8"])
def test_a_hundred_steps_are_those_of_the_processor(kind: str) -> None:
    ours, theirs = both("AdamW", kind)
    train(ours, 100)
    train(theirs, 100)
    same_optimizers(ours, theirs)


@needs_cuda
@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_steps_are_near_those_of_torch(name: str, options: dict[str, Any]) -> None:
    ours = make(name, on_device(weights()), **options)
    theirs = getattr(torch.optim, name)(on_device(weights()), lr=0.01, **options)
    for own, wanted in zip(train(ours, 5), train(theirs, 5), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


def test_numbers_of_steps_lie_on_the_device_as_in_fused_classes_of_torch() -> None:
    optimizer = make("AdamW", on_device(weights()))
    for parameter in train(optimizer, 3):
        step = optimizer.state[parameter]["step"]
        assert (step.device, step.dtype, step.shape) == (parameter.device, torch.float32, ())
        assert step.item() == 3.0


# What may happen between two steps


def replaced_memory(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = parameter.data.clone()


def replaced_state(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][3]]
    state["exp_avg"] = state["exp_avg"] * 2


def replaced_entry(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][3]
    state = optimizer.state[parameter]
    optimizer.state[parameter] = {key: value * 2 for key, value in state.items()}


def replaced_table(optimizer: Any) -> None:
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.state = state


def changed_state_memory(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][3]]
    state["exp_avg"].data = state["exp_avg"].data * 2


def counted_step(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"] += 3


def replaced_parameter(optimizer: Any) -> None:
    parameters = optimizer.param_groups[0]["params"]
    new = parameters[1].detach().clone()
    optimizer.state[new] = optimizer.state.pop(parameters[1])
    parameters[1] = new


def dropped_parameter(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop())


def added_group(optimizer: Any) -> None:
    like = optimizer.param_groups[0]["params"][0]
    new = torch.ones(77, device=like.device)
    optimizer.add_param_group({"params": [new], "lr": 0.1})


def moved_streams(optimizer: Any) -> None:
    """Of random numbers: the first group gets a parameter, so that those of the second move on."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        optimizer.add_param_group({"params": [groups[0]["params"].pop()]})
    else:
        new = torch.ones(77, device=groups[0]["params"][0].device)
        groups[0]["params"].append(new)


def other_rate(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def other_decay(optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0


def other_sign(optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = True


def loaded_checkpoint(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


EVENTS = [
    replaced_memory,
    replaced_state,
    replaced_entry,
    replaced_table,
    changed_state_memory,
    counted_step,
    replaced_parameter,
    dropped_parameter,
    added_group,
    other_rate,
    other_decay,
    other_sign,
    loaded_checkpoint,
]


@pytest.mark.parametrize("event", EVENTS)
def test_a_step_sees_what_happened_before_it(event: Any) -> None:
    ours, theirs = both("AdamW")
    train(ours, 2)
    event(ours)
    train(ours, 2, first=2)
    with on_processor():
        train(theirs, 2)
        event(theirs)
        train(theirs, 2, first=2)
    same_optimizers(ours, theirs)


def test_random_numbers_follow_the_places_of_parameters() -> None:
    ours, theirs = both("AdamW", "fp32-bf16")

    def run(optimizer: Any) -> None:
        for event in (None, moved_streams, moved_streams):
            if event is not None:
                event(optimizer)
            train(optimizer, 2)

    run(ours)
    with on_processor():
        run(theirs)
    same_optimizers(ours, theirs)


@pytest.mark.parametrize("is_native", [True, False], ids=["library", "python"])
def test_gradients_that_come_and_go_are_noticed(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr("oxytorch.optim.gpu.address_guard._functions", lambda: None)
    ours, theirs = both("AdamW")

    def run(optimizer: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        square = parameters[3]
        for step, without in enumerate([(), (1, 3), (1,), (0, 1, 2, 3, 4, 5, 6), ()]):
            give_gradients(parameters, step)
            for place in without:
                parameters[place].grad = None
            if step == 2:
                # The same memory in another order of dimensions.
                square.grad = square.grad.t().contiguous().t()
            optimizer.step()

    run(ours)
    with on_processor():
        run(theirs)
    same_optimizers(ours, theirs)


def test_a_step_is_planned_once(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make("AdamW", on_device(weights()))
    train(optimizer, 1)
    made = []
    monkeypatch.setattr(step_cache, "plan", lambda *_: made.append(1))
    train(optimizer, 3, first=1)
    assert not made
    if device is not None:
        before = device.uploads
        optimizer.step()
        assert device.uploads == before


def test_states_of_other_optimizers_are_their_own_business() -> None:
    one, other = (make("AdamW", on_device(weights())) for _ in range(2))
    train(one, 1)
    record = one._step_caches[0, None]
    train(other, 2)
    train(one, 2, first=1)
    assert one._step_caches[0, None] is record


def test_an_entry_of_another_optimizer_is_looked_at_each_time() -> None:
    one, other = (make("AdamW", on_device(weights())) for _ in range(2))
    train(one, 1)
    train(other, 1)
    parameter, twin = one.param_groups[0]["params"][0], other.param_groups[0]["params"][0]
    other.state[twin] = one.state[parameter]
    train(other, 1)
    assert not other._step_caches
    other.state[twin]["exp_avg"] = torch.zeros_like(parameter)
    train(one, 1)
    assert torch.equal(one.state[parameter]["exp_avg"], 0.1 * parameter.grad)


def test_versions_of_parameters_are_counted() -> None:
    optimizer = make("AdamW", on_device(weights()))
    train(optimizer, 1)
    before = [p._version for p in optimizer.param_groups[0]["params"]]
    optimizer.step()
    after = [p._version for p in optimizer.param_groups[0]["params"]]
    assert after == [version + 1 for version in before]


# Checkpoints


@pytest.mark.parametrize("kind", ["fp32", "split-int8"])
def test_checkpoints_move_between_devices_and_copies(kind: str) -> None:
    ours, theirs = both("AdamW", kind)
    train(ours, 2)
    with on_processor():
        train(theirs, 2)
    stored = io.BytesIO()
    torch.save(ours.state_dict(), stored)
    stored.seek(0)
    loaded = torch.load(stored, map_location="cpu", weights_only=True)
    with on_processor():
        theirs.load_state_dict(loaded)
        train(theirs, 2, first=2)
    for own in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        train(own, 2, first=2)
        same_optimizers(own, theirs)
    ours.load_state_dict(loaded)
    train(ours, 2, first=2)
    same_optimizers(ours, theirs)


@pytest.mark.parametrize("fused", [False, True] if HAS_GPU else [False])
def test_checkpoints_of_torch_go_both_ways(fused: bool) -> None:
    ours = make("AdamW", on_device(weights()))
    theirs = torch.optim.AdamW(on_device(weights()), lr=0.01, fused=fused)
    train(theirs, 2)
    ours.load_state_dict(theirs.state_dict())
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        own.copy_(other)
    train(ours, 2, first=2)
    back = torch.optim.AdamW(on_device(weights()), lr=0.01, fused=fused)
    back.load_state_dict(ours.state_dict())
    train(theirs, 2, first=2)
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
        assert back.state[back.param_groups[0]["params"][0]]["step"] == 4


# Forms of parameters


def test_any_dense_order_and_any_address_works() -> None:
    def odd(device: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        picture = torch.randn(4, 8, 6, 7, generator=generator).to(device)
        shifted = torch.randn(4099, generator=generator).to(device)
        return [picture.to(memory_format=torch.channels_last), shifted[1:], shifted[:0]]

    ours, theirs = make("AdamW", odd(DEVICE)), make("AdamW", odd(torch.device("cpu")))

    def run(optimizer: Any) -> None:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in optimizer.param_groups[0]["params"]:
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                # In the first step in another order than the parameter's.
                parameter.grad = gradient if step == 0 else torch.zeros_like(parameter) + gradient
            optimizer.step()

    run(ours)
    with on_processor():
        run(theirs)
    same_optimizers(ours, theirs)


def test_a_slice_is_refused() -> None:
    parameter = torch.zeros(8, 8, device=DEVICE)[:, :4]
    optimizer = optim.AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter)[:, :4]
    with pytest.raises(RuntimeError, match="without holes"):
        optimizer.step()


def test_groups_have_options_of_their_own() -> None:
    def make_groups(device: torch.device) -> Any:
        plain = [w.to(device) for w in weights()]
        groups = [
            {"params": plain[:3], "lr": 0.1},
            {"params": [w.bfloat16() for w in plain[3:]], "master_weights": "split"},
        ]
        return optim.AdamW(groups, state_dtype=torch.int8, seed=5)

    ours = make_groups(DEVICE)
    with on_processor():
        theirs = make_groups(torch.device("cpu"))
        train(theirs, 3)
    train(ours, 3)
    same_optimizers(ours, theirs)
    assert len(ours._step_caches) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_kernels_do_not_take_goes_as_in_torch(dtype: torch.dtype) -> None:
    ours, theirs = torch.ones(5, device=DEVICE, dtype=dtype), torch.ones(5, dtype=dtype)
    for parameter, kind in ((ours, optim.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.full_like(parameter, 2)
        optimizer.step()
    torch.testing.assert_close(ours.cpu(), theirs)
