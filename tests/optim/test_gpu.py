"""Steps on a GPU: the bits of the processor's kernels, and all that may happen between two steps.

Without a GPU `test_gpu_interpreted.py` runs a part of them in Triton's interpreter.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpu_device
import pytest
import torch
from gpu_device import DEVICE, HAS_GPU, IS_INTERPRETED
from optimizers import CASES, IDS, MEASURED, STOCK, STOCK_IDS, make, weights
from torch import Tensor, nn

from oxytorch import optim
from oxytorch.optim import _devices, _planned

pytestmark = pytest.mark.skipif(
    not (HAS_GPU or IS_INTERPRETED), reason="no GPU here; test_gpu_interpreted.py runs a part"
)
needs_cuda = pytest.mark.skipif(IS_INTERPRETED or not HAS_GPU, reason="needs an NVIDIA GPU")

FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32-bf16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "fp32-int8": (torch.float32, {"state_dtype": torch.int8}),
    "split": (torch.bfloat16, {"master_weights": "split"}),
    "split-bf16": (torch.bfloat16, {"master_weights": "split", "state_dtype": torch.bfloat16}),
    "split-int8": (torch.bfloat16, {"master_weights": "split", "state_dtype": torch.int8}),
    "bf16": (torch.bfloat16, {}),
    "bf16-fp32": (torch.bfloat16, {"state_dtype": torch.float32}),
    "fp16": (torch.float16, {}),
    "fp16-int8": (torch.float16, {"state_dtype": torch.int8}),
}


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Any]:
    """The device that steps run on; in the interpreter one that can be looked into."""
    if not IS_INTERPRETED:
        yield None
        return
    yield gpu_device.install()
    _devices._known[torch.device("cpu")] = None


@contextmanager
def on_processor() -> Iterator[None]:
    """Steps on CPU tensors run by the compiled kernels inside."""
    cpu = torch.device("cpu")
    before = _devices._known[cpu]
    _devices._known[cpu] = None
    try:
        yield
    finally:
        _devices._known[cpu] = before


def on_device(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [tensor.to(DEVICE, dtype, copy=True) for tensor in tensors]


def give_gradients(parameters: list[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same gradients on every device; every second time in the memory of the ones before."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16() * scale
        if seed % 2 and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def train(optimizer: Any, steps: int, first: int = 0) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters


def both(name: str, format_name: str = "fp32", **options: Any) -> tuple[Any, Any]:
    """An optimizer on the device and the same on the processor."""
    dtype, own = FORMATS[format_name]
    plain = [w.to(dtype) for w in weights()]
    return (
        make(name, on_device(plain, dtype), **options, **own),
        make(name, [w.clone() for w in plain], **options, **own),
    )


def same(actual: Tensor, wanted: Tensor, exactly: bool = True) -> None:
    actual = actual.detach().cpu()
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    if exactly:
        assert torch.equal(actual, wanted)
    elif actual.is_floating_point():
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=1e-4, equal_nan=True)
    else:
        assert actual.dtype == torch.int16 or ((actual.float() - wanted.float()).abs() <= 1).all()


def same_optimizers(ours: Any, theirs: Any, exactly: bool = True) -> None:
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for own, wanted in zip(group["params"], other["params"], strict=True):
            same(own, wanted.detach(), exactly)
            assert ours.state[own].keys() == theirs.state[wanted].keys()
            for key, value in theirs.state[wanted].items():
                same(ours.state[own][key], value, exactly)


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
    assert len(ours._records) == 1


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
        monkeypatch.setattr("oxytorch.optim._watch._functions", lambda: None)
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
    monkeypatch.setattr(_planned, "plan", lambda *_: made.append(1))
    train(optimizer, 3, first=1)
    assert not made
    if device is not None:
        before = device.uploads
        optimizer.step()
        assert device.uploads == before


def test_states_of_other_optimizers_are_their_own_business() -> None:
    one, other = (make("AdamW", on_device(weights())) for _ in range(2))
    train(one, 1)
    record = one._records[0, None]
    train(other, 2)
    train(one, 2, first=1)
    assert one._records[0, None] is record


def test_an_entry_of_another_optimizer_is_looked_at_each_time() -> None:
    one, other = (make("AdamW", on_device(weights())) for _ in range(2))
    train(one, 1)
    train(other, 1)
    parameter, twin = one.param_groups[0]["params"][0], other.param_groups[0]["params"][0]
    other.state[twin] = one.state[parameter]
    train(other, 1)
    assert not other._records
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
    assert len(ours._records) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_kernels_do_not_take_goes_as_in_torch(dtype: torch.dtype) -> None:
    ours, theirs = torch.ones(5, device=DEVICE, dtype=dtype), torch.ones(5, dtype=dtype)
    for parameter, kind in ((ours, optim.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.full_like(parameter, 2)
        optimizer.step()
    torch.testing.assert_close(ours.cpu(), theirs)


# Gradients: clipping, scaling, release


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_in_the_step_is_that_of_torch(dtype: torch.dtype) -> None:
    ours = optim.SGD(on_device(weights(), dtype), lr=0.1)
    theirs = torch.optim.SGD(on_device(weights(), dtype), lr=0.1)
    for step in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer.param_groups[0]["params"], step)
        norm = ours.clip_grad_norm_(1.0)
        parameters = theirs.param_groups[0]["params"]
        wanted = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert norm.dtype == wanted.dtype and norm.device == wanted.device
        torch.testing.assert_close(norm, wanted)
        ours.step()
        theirs.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def test_clipping_at_once_is_that_of_torch() -> None:
    ours, theirs = on_device(weights()), on_device(weights())
    for parameters in (ours, theirs):
        give_gradients(parameters, 0)
    norm = optim.clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_norm_that_is_not_finite_is_an_error_if_wanted() -> None:
    parameters = on_device(weights())
    give_gradients(parameters, 0)
    parameters[0].grad[3, 3] = torch.nan
    optimizer = optim.SGD(parameters, lr=0.1)
    assert optimizer.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lamb", "Adafactor"])
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
def test_a_grad_scaler_divides_and_leaves_steps_out(name: str, clips: bool) -> None:
    ours, theirs = (make(name, on_device(weights())) for _ in range(2))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    for step in range(4):
        for optimizer, scale in ((ours, 1024.0), (theirs, 1.0)):
            give_gradients(optimizer.param_groups[0]["params"], step, scale)
        scaler.scale(torch.ones((), device=DEVICE))
        is_bad = step == 2
        if is_bad:
            ours.param_groups[0]["params"][0].grad[1, 2] = torch.inf
        if clips:
            norm = ours.clip_grad_norm_(1.0, scaler=scaler)
            wanted = theirs.clip_grad_norm_(1.0)
            if not is_bad:
                torch.testing.assert_close(norm, wanted)
        scaler.step(ours)
        if not is_bad:
            theirs.step()
        else:
            theirs.zero_grad()
        scaler._per_optimizer_states.clear()
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        assert ours.state[own].get("step") == theirs.state[other].get("step")


def test_gradients_are_released_inside_backward() -> None:
    def run(device: torch.device, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, **options)
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    plain, released = run(DEVICE), run(DEVICE, release_gradients=True)
    for own, other in zip(released, plain, strict=True):
        assert torch.equal(own, other)


def test_a_rate_on_the_device_is_followed() -> None:
    rate = torch.tensor(0.01, device=DEVICE)
    ours = optim.AdamW(on_device(weights()), lr=rate)
    theirs = make("AdamW", weights())
    train(ours, 1)
    record = ours._records[0, None]
    rate.fill_(0.25)
    train(ours, 2, first=1)
    assert ours._records[0, None] is record
    with on_processor():
        train(theirs, 1)
        theirs.param_groups[0]["lr"] = 0.25
        train(theirs, 2, first=1)
    same_optimizers(ours, theirs, exactly=False)


def test_memory_report_counts_what_lies_on_the_device() -> None:
    parameter = torch.zeros(256, 256, device=DEVICE, dtype=torch.bfloat16)
    optimizer = optim.AdamW([parameter], master_weights="split", state_dtype=torch.int8)
    train(optimizer, 1)
    report = optimizer.memory_report()
    assert report["low_half"] == 2.0 and report["total"] < 6.1
