"""What optimizers refuse, before anything is modified, and what they leave to torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import MEASURED, OPTIONS, STOCK, STOCK_IDS, give_gradients, make, train, weights
from torch import Tensor

from oxytorch import optim

NAMES = sorted(OPTIONS)


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in list(tensors):
        tensors += [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (name, {argument: value})
        for name in NAMES
        for argument in ("lr", "weight_decay")
        for value in (-1.0, float("nan"))
        # What torch's classes accept, ours accept.
        if value < 0 or not hasattr(torch.optim, name)
    ]
    + [
        ("SGD", {"momentum": -0.1}),
        ("SGD", {"nesterov": True}),
        ("Adam", {"betas": (1.0, 0.9)}),
        ("AdamW", {"eps": -1e-8}),
        ("Adagrad", {"lr_decay": -1.0}),
        ("RMSprop", {"alpha": -1.0}),
        ("Adafactor", {"d": 0.5}),
        ("Lamb", {"betas": (0.9, 1.0)}),
        ("Lamb", {"eps": -1.0}),
        ("Lion", {"betas": (-0.1, 0.9)}),
        ("Lars", {"eeta": -1.0}),
        ("Lars", {"momentum": -1.0}),
        ("AdamW", {"lr": torch.tensor([0.1, 0.2])}),
        ("Lamb", {"lr": torch.tensor([0.1, 0.2])}),
    ],
    ids=str,
)
def test_bad_hyper_parameters_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        getattr(optim, name)([_parameter(3)], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master_weights": "yes"}, r'master_weights None or "split", got \'yes\''),
        ({"state_dtype": torch.float64}, "state_dtype None, torch.float32, .* got torch.float64"),
        ({"seed": 0.5}, "integer as seed, got 0.5"),
    ],
    ids=str,
)
def test_bad_formats_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.AdamW([_parameter(3)], **arguments)
    with pytest.raises(ValueError, match=message):
        optim.AdamW([{"params": [_parameter(3)], **arguments}])


def test_split_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="got a float16 parameter"):
        optim.AdamW([_parameter(3, dtype=torch.float16)], master_weights="split")


@pytest.mark.parametrize("name", NAMES)
def test_no_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        getattr(optim, name)([])


@pytest.mark.parametrize("name", NAMES)
def test_empty_groups_and_missing_gradients_are_left_alone(name: str) -> None:
    used, unused = _parameter(5, 3), _parameter(4)
    before = unused.detach().clone()
    optimizer = getattr(optim, name)([{"params": [used, unused]}, {"params": []}], lr=0.1)
    optimizer.step()
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert torch.equal(unused, before)
    # torch's Adagrad makes its states in the constructor.
    assert bool(optimizer.state.get(unused)) == (name == "Adagrad")
    assert optimizer.memory_report()["total"] > 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_another_dtype_is_taken(name: str) -> None:
    wide, narrow = (make(name, [w.clone()]) for w in [torch.randn(9, 5)] for _ in range(2))
    for step in range(3):
        for optimizer in (wide, narrow):
            give_gradients(optimizer, step)
        parameter = narrow.param_groups[0]["params"][0]
        gradient = parameter.grad.bfloat16()
        parameter.grad = None
        # What autograd refuses to make, autocast's hooks and other programs do make.
        parameter.grad_dtype = None
        parameter.grad = gradient
        wide.step()
        narrow.step()
    for a, b in zip(*(o.param_groups[0]["params"] for o in (wide, narrow)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "Adafactor"])
def test_a_state_of_another_shape_is_refused_before_anything_changes(name: str) -> None:
    options = {"momentum": 0.9} if name in ("SGD", "Lars") else {}
    optimizer = make(name, weights(), **options)
    train(optimizer, 1)
    parameters = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameters[-1]]
    key = optimizer._names(optimizer.param_groups[0])[0]
    state[key] = torch.zeros(3)
    before = _snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"expected states of shape \[1030\], got \[3\]"):
        optimizer.step()
    assert all(map(torch.equal, _snapshot(optimizer), before))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_nan_and_infinity_spread_as_in_torch(
    name: str, options: dict[str, Any], value: float
) -> None:
    theirs = getattr(torch.optim, name)([torch.ones(300)], lr=0.01, foreach=False, **options)
    ours = make(name, [torch.ones(300)], **options)
    for step in range(3):
        for optimizer in (theirs, ours):
            give_gradients(optimizer, step)
            if step == 1:
                optimizer.param_groups[0]["params"][0].grad[::7] = value
            optimizer.step()
    (actual,), (wanted,) = (o.param_groups[0]["params"] for o in (ours, theirs))
    torch.testing.assert_close(actual, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in MEASURED])
def test_infinity_stays_within_its_block_of_codes(name: str) -> None:
    parameter = torch.ones(8192)
    optimizer = make(name, [parameter], state_dtype=torch.int8)
    gradient = torch.ones(8192)
    gradient[300] = torch.inf
    for _ in range(2):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert not parameter[300].isfinite() or name == "Lion"
    assert parameter[:256].isfinite().all()
    assert parameter[512:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})]
)
def test_sparse_gradients_go_as_in_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """In 16 bits with torch's rounding too."""
    theirs, ours = (
        getattr(o, name)([torch.ones(6, 2, dtype=dtype)], lr=0.1, **options)
        for o in (torch.optim, optim)
    )
    for _ in range(20):
        gradient = torch.sparse_coo_tensor(
            [[1, 4, 4]], torch.randn(3, 2).to(dtype), (6, 2), check_invariants=True
        )
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
    assert torch.equal(theirs.param_groups[0]["params"][0], ours.param_groups[0]["params"][0])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("SGD", "Adagrad")])
def test_sparse_gradients_are_refused_where_torch_refuses(name: str) -> None:
    parameter = torch.ones(6, 2)
    optimizer = make(name, [parameter])
    parameter.grad = torch.eye(6, 2).to_sparse()
    with pytest.raises(RuntimeError, match=f"{name}: sparse .*SparseAdam.*sparse=False"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(6, 2))


def test_sparse_gradients_are_refused_beside_formats() -> None:
    parameter = torch.ones(6, 2, dtype=torch.bfloat16)
    optimizer = optim.SGD([parameter], master_weights="split")
    parameter.grad = torch.eye(6, 2).bfloat16().to_sparse()
    with pytest.raises(RuntimeError, match="neither master_weights nor state_dtype"):
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_complex_parameters_go_as_in_torch(name: str) -> None:
    start = torch.randn(5, dtype=torch.complex64)
    theirs, ours = (getattr(o, name)([start.clone()], lr=0.1) for o in (torch.optim, optim))
    for _ in range(3):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["params"][0].grad = start * 0.5
            optimizer.step()
    assert torch.equal(theirs.param_groups[0]["params"][0], ours.param_groups[0]["params"][0])


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Lars", "Lion"])
def test_complex_parameters_are_refused_where_torch_has_no_way(name: str) -> None:
    optimizer = make(name, [torch.ones(3, dtype=torch.complex64)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=f"{name}: complex .*AdamW.*view_as_real"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), STOCK, ids=STOCK_IDS)
def test_other_dtypes_and_strides_go_as_in_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    def tensors() -> list[Tensor]:
        torch.manual_seed(3)
        holes = torch.randn(6, 8).to(dtype)[:, ::2]
        filters = torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last)
        return [holes, filters, torch.randn(7, 5).to(dtype).t(), torch.randn(3).to(dtype)]

    theirs = getattr(torch.optim, name)(tensors(), lr=0.01, foreach=False, **options)
    if dtype == torch.float32:
        # What has holes between its elements is refused: there is no flat memory to update.
        refused = make(name, tensors()[:1], **options)
        give_gradients(refused, 0)
        with pytest.raises(RuntimeError, match="without holes"):
            refused.step()
        theirs.param_groups[0]["params"] = theirs.param_groups[0]["params"][1:]
    ours = make(name, tensors()[dtype == torch.float32 :], **options)
    for wanted, actual in zip(train(theirs, 5), train(ours, 5), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
        assert actual.stride() == wanted.stride()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in MEASURED])
def test_parameters_of_several_devices_are_updated(name: str) -> None:
    """A meta tensor stands for the other device: it has no values, but all else."""
    here, there, alone = torch.ones(4), torch.ones(4, device="meta"), torch.ones(4)
    optimizer = make(name, [here, there])
    for one in (optimizer, make(name, [alone])):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
        one.step()
    assert not torch.equal(alone, torch.ones(4))
    torch.testing.assert_close(here, alone, rtol=1e-6, atol=1e-7)
    for value in optimizer.state[there].values():
        assert not isinstance(value, Tensor) or value.numel() == 1 or value.is_meta


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_corrupt_checkpoint_leaves_the_optimizer_as_it_was(key: str) -> None:
    optimizer = make("AdamW", weights(), state_dtype=torch.int8)
    train(optimizer, 2)
    before = _snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    saved["state"][3][key] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=rf"expected {key} of shape \[64, 80\]"):
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, _snapshot(optimizer), before))
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(optimizer, 1, first=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.pop("param_groups"),
        lambda saved: saved["param_groups"].append(saved["param_groups"][0]),
        lambda saved: saved["param_groups"][0]["params"].pop(),
    ],
)
def test_a_checkpoint_of_other_groups_is_refused(change: Any) -> None:
    optimizer = make("AdamW", weights())
    train(optimizer, 1)
    before = _snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, _snapshot(optimizer), before))
    train(optimizer, 1, first=1)


def test_a_master_weight_of_another_tensor_or_shape_is_refused() -> None:
    parameter = torch.ones(4, dtype=torch.bfloat16)
    optimizer = optim.SGD([parameter], master_weights="split")
    with pytest.raises(ValueError, match="expected one of the optimizer's own parameters"):
        optimizer.master_weight(torch.ones(4))
    with pytest.raises(ValueError, match=r"expected weight of shape \[4\], got \[5\]"):
        optimizer.set_master_weight(parameter, torch.ones(5))
