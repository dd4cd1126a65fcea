"""What functions of torch do with split weights: every write is one, every value is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch import optim
from oxytorch.optim import split_functions
from oxytorch.optim.split_parameter import SplitParameter
from split_models import assert_weights, pair, step, weights

pytestmark = pytest.mark.usefixtures("pack_small_layers")


def _seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return function()


def _assert_is_weight(model: Any, optimizer: Any, wanted: Tensor) -> None:
    """The weight of the head is `wanted` to who reads it, now and after a step."""
    assert torch.equal(model.state_dict()["head.weight"], wanted)
    assert torch.equal(optimizer.master_weight(model.head.weight), wanted)
    model.head.weight.grad = torch.ones(3, 8, dtype=torch.bfloat16)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(model.state_dict()["head.weight"], wanted)


# Writes with gradients enabled: what torch lets write does, what it refuses is refused.

INITS: dict[str, Callable[[Any], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "constant_": lambda w: nn.init.constant_(w, 1 / 3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "by keyword": lambda w: nn.init.normal_(tensor=w, std=0.3),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_initializations_are_written(init: Callable[[Any], Any], has_gradients: bool) -> None:
    model, optimizer = pair()
    plain = nn.Parameter(weights(model)["head.weight"])
    with torch.set_grad_enabled(has_gradients):
        returned = _seeded(lambda: init(model.head.weight))
        _seeded(lambda: init(plain))
    assert returned is model.head.weight
    _assert_is_weight(model, optimizer, plain.detach())


def test_layers_are_reset() -> None:
    model, optimizer = pair()
    plain = copy.deepcopy(model.head)
    _seeded(model.head.reset_parameters)
    _seeded(plain.reset_parameters)
    assert torch.equal(model.head.bias.detach(), plain.bias)
    _assert_is_weight(model, optimizer, plain.weight.detach())


UNDER_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda w: w.mul_(2),
    "item": lambda w: w.__setitem__(0, 1.0),
    "in place": lambda w: nn.functional.relu(w, inplace=True),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.mul(torch.ones(3, 8), 2, out=w),
    "apply_": lambda w: w.apply_(lambda x: x),
}


@pytest.mark.parametrize("write", UNDER_GRADIENTS.values(), ids=UNDER_GRADIENTS)
def test_writes_that_torch_refuses_leave_the_weight(write: Callable[[Any], Any]) -> None:
    model, optimizer = pair()
    wanted = weights(model)["head.weight"]
    with pytest.raises(RuntimeError):
        write(nn.Parameter(wanted.clone()))
    with pytest.raises(RuntimeError):
        write(model.head.weight)
    _assert_is_weight(model, optimizer, wanted)


# Functions that write without saying so, and lists.

VALUES: dict[str, Callable[[Any], Any]] = {
    "apply_": lambda w: w.apply_(lambda x: x * 0.9999),
    "map_": lambda w: w.map_(torch.ones(3, 8), lambda x, y: x * 0.9999 + y),
    "foreach of data": lambda w: torch._foreach_mul_([w], 0.9999),
    "foreach with others": lambda w: torch._foreach_mul_([torch.ones(2), w], 0.9999),
    "relu in place": lambda w: nn.functional.relu(w, inplace=True),
    "dropout in place": lambda w: nn.functional.dropout(w, 1.0, inplace=True),
    "out": lambda w: torch.mul(torch.full((3, 8), 1 / 3), 0.9999, out=w),
    "out of bfloat16": lambda w: torch.add(w, torch.ones(3, 8).bfloat16(), out=w),
    "packet": lambda w: torch.ops.aten.mul_(w, 0.9999),
    "module_load": lambda w: w.copy_(w * 0.9999),
}


@pytest.mark.parametrize("write", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("taken", [lambda w: w.data, lambda w: w.detach()], ids=["data", "detach"])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_writes_to_values_are_writes(
    write: Callable[[Any], Any], taken: Callable[[Any], Any], has_gradients: bool
) -> None:
    model, optimizer = pair()
    plain = weights(model)["head.weight"]
    with torch.set_grad_enabled(has_gradients):
        write(taken(model.head.weight))
        write(plain)
    _assert_is_weight(model, optimizer, plain)


NARROW: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda w, g: w.add_(g, alpha=-0.01),
    "sub_": lambda w, g: w.sub_(g, alpha=0.01),
    "lerp_": lambda w, g: w.lerp_(g, 0.01),
    "addcmul_": lambda w, g: w.addcmul_(g, g, value=-0.01),
    "addcdiv_": lambda w, g: w.addcdiv_(g, g, value=-0.01),
    "copy_": lambda w, g: w.copy_(g),
    "masked_scatter_": lambda w, g: w.masked_scatter_(torch.ones(3, 8) > 0, g),
    "index_add_": lambda w, g: w.index_add_(0, torch.tensor([0, 2]), g[:2]),
    "index_copy_": lambda w, g: w.index_copy_(0, torch.tensor([0, 2]), g[:2]),
    "scatter_add_": lambda w, g: w.scatter_add_(0, torch.zeros(3, 8, dtype=torch.long), g),
    "addmm_": lambda w, g: w.addmm_(g[:, :3], g[:3]),
    "item": lambda w, g: w.__setitem__(torch.tensor([1]), g[:1]),
    "foreach add": lambda w, g: torch._foreach_add_([w], [g], alpha=-0.01),
    "foreach lerp": lambda w, g: torch._foreach_lerp_([w], [g], 0.01),
    "foreach addcdiv": lambda w, g: torch._foreach_addcdiv_([w], [g], [g], value=-0.01),
    "operator": lambda w, g: w.__isub__(g),
    "out of place": lambda w, g: w.copy_(w - 0.01 * g.float()),
    "difference": lambda w, g: w.copy_(w - g),
    "product": lambda w, g: w.copy_(g * w),
    "lerp": lambda w, g: w.copy_(torch.lerp(w, g, 0.01)),
    "where": lambda w, g: w.copy_(torch.where(g > 0, w, g)),
    "cat": lambda w, g: w.copy_(torch.cat([w, g])[:3]),
    "foreach out of place": lambda w, g: w.copy_(torch._foreach_sub([w], [g])[0]),
}


@pytest.mark.parametrize("write", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("taken", [lambda w: w, lambda w: w.data], ids=["parameter", "data"])
@torch.no_grad()
def test_gradients_of_16_bits_meet_float32_weights(
    write: Callable[[Any, Any], Any], taken: Callable[[Any], Any]
) -> None:
    """As the same gradient in float32 meets a plain weight."""
    model, optimizer = pair()
    plain = weights(model)["head.weight"]
    gradient = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    write(taken(model.head.weight), gradient)
    write(plain, gradient.float())
    _assert_is_weight(model, optimizer, plain)


BESIDE: dict[str, Callable[[Any, Any], Any]] = {
    "expand_as": lambda w, h: w[:1].expand_as(h),
    "view_as": lambda w, h: w.view_as(h),
    "reshape_as": lambda w, h: w.reshape_as(h),
    "broadcast_tensors": lambda w, h: torch.broadcast_tensors(w, h)[0],
    "clamp": lambda w, h: torch.clamp(w, max=h),
    "kron": torch.kron,
    "outer": lambda w, h: torch.outer(w[0], h[0]),
    "logaddexp": torch.logaddexp,
    "block_diag": torch.block_diag,
    "dist": torch.dist,
    "mse_loss": nn.functional.mse_loss,
    "l1_loss": nn.functional.l1_loss,
    "huber_loss": nn.functional.huber_loss,
    "kl_div": lambda w, h: nn.functional.kl_div(w, h.abs(), reduction="sum"),
    "cosine_similarity": nn.functional.cosine_similarity,
    "gaussian_nll_loss": lambda w, h: nn.functional.gaussian_nll_loss(h, h, w.exp()),
    "cross_entropy": lambda w, h: nn.functional.cross_entropy(w, h.softmax(1)),
}


@pytest.mark.parametrize("function", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("has_autocast", [False, True])
def test_outside_of_forwards_weights_are_float32_beside_outputs_of_16_bits(
    function: Callable[[Any, Any], Any], has_autocast: bool
) -> None:
    """A policy's standard deviation has the shape of its mean, which a layer gives."""
    model, _ = pair()
    plain = weights(model)["head.weight"]
    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        found, wanted = function(model.head.weight, given), function(plain, given)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@torch.no_grad()
def test_buffers_of_the_gradients_dtype_take_weights() -> None:
    model, _ = pair()
    wanted = weights(model)["head.weight"]
    buffer = torch.zeros(3, 8, dtype=torch.bfloat16)
    buffer.lerp_(model.head.weight, 0.5)
    torch._foreach_lerp_([buffer], [model.head.weight], 0.5)
    torch.testing.assert_close(buffer.float(), wanted * 0.75, rtol=0.02, atol=1e-3)


# What cannot be done says what to do.

REFUSED: dict[str, Callable[[Any], Any]] = {
    "t_": lambda w: w.t_(),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "resize_": lambda w: w.resize_(2, 2),
    "as_strided_": lambda w: w.as_strided_((2,), (1,)),
    "storage fill": lambda w: w.untyped_storage().fill_(0),
    "storage copy": lambda w: w.untyped_storage().copy_(torch.ones(1).untyped_storage()),
    "storage resize": lambda w: w.untyped_storage().resize_(0),
    "typed storage": lambda w: w.storage().__setitem__(0, 1.0),
    "typed fill": lambda w: w.storage().fill_(1.0),
    "dlpack": lambda w: torch.from_dlpack(w),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("taken", [lambda w: w, lambda w: w.data], ids=["parameter", "data"])
@torch.no_grad()
def test_what_is_no_write_is_refused_with_a_remedy(
    change: Callable[[Any], Any], taken: Callable[[Any], Any]
) -> None:
    model, optimizer = pair()
    wanted = weights(model)["head.weight"]
    with pytest.raises((TypeError, RuntimeError), match=r"p\.(data|fill_|detach)"):
        change(taken(model.head.weight))
    _assert_is_weight(model, optimizer, wanted)


def test_what_stands_for_a_weight_keeps_its_memory() -> None:
    model, optimizer = pair()
    wanted = weights(model)["head.weight"]
    kept = model.head.weight.data
    with pytest.raises(TypeError, match=r"set p\.data itself"):
        kept.data = torch.ones(3, 8)
    with pytest.raises(TypeError, match=r"set p\.data itself"):
        kept.set_(torch.ones(3, 8))
    with pytest.raises(TypeError, match=r"pass p\.detach\(\)\.clone\(\)"):
        nn.Parameter(model.head.weight)
    assert torch.equal(nn.Parameter(model.head.weight.detach().clone()), wanted)
    _assert_is_weight(model, optimizer, wanted)


def test_storages_can_be_asked() -> None:
    model, _ = pair()
    storage = model.head.weight.untyped_storage()
    assert storage.data_ptr() == model.head.weight.data_ptr()
    assert storage.nbytes() == len(storage) == 2 * 24
    assert type(storage) is torch.UntypedStorage
    assert storage is model.head.weight.untyped_storage()
    model.head.weight.data.untyped_storage()
    kept = model.head.weight.data
    assert kept.untyped_storage().nbytes() == 4 * 24
    oxytorch.undo(model)
    assert model.head.weight.data_ptr() == kept.data_ptr()
    model.head.weight.untyped_storage().fill_(0)
    assert not model.head.weight.any()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_checkpoints_that_look_at_storages_are_written(tmp_path: Any) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    model, _ = pair()
    wanted = weights(model)
    for write in (checkpoint.save, lambda *args, **kw: checkpoint.async_save(*args, **kw).result()):
        write(model.state_dict(), checkpoint_id=tmp_path / str(write))
        loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
        checkpoint.load(loaded, checkpoint_id=tmp_path / str(write))
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


def test_every_method_that_writes_is_known() -> None:
    """A method of torch that writes, counts no write, and is in no list would lose it."""
    tensor = torch.ones(2, 2)
    cases: dict[str, tuple[Any, ...]] = {
        "apply_": (lambda x: x,),
        "map_": (tensor, lambda x, y: x),
        "map2_": (tensor, tensor, lambda x, y, z: x),
    }
    for name, arguments in cases.items():
        assert name in split_functions.UNCOUNTED
        before = tensor._version
        getattr(tensor, name)(*arguments)
        assert tensor._version == before
    for name in dir(Tensor):
        if not name.endswith("_") or name.startswith("_") or name in split_functions.ASKS:
            continue
        assert split_functions.writes_first(name), name
        own = torch.rand(2, 2) * 0.5 + 0.25
        before, values = own._version, own.clone()
        for given in ((), (0.5,), (torch.full((2, 2), 0.5),)):
            try:
                getattr(own, name)(*given)
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                continue
            is_same = own.shape == values.shape and torch.equal(own.float(), values)
            known = name in split_functions.UNCOUNTED or name in split_functions.REFUSED
            assert is_same or known or own._version > before, name
            break


def test_every_function_over_lists_that_writes_is_known() -> None:
    fused = {name for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")}
    steps = {name for name in fused if "self" in str(_schema(name))}
    assert steps == split_functions.FUSED_STEPS
    counted = 0
    for name in dir(torch):
        if not (name.startswith("_foreach_") and name.endswith("_")):
            continue
        own = [torch.full((2, 2), 0.25)]
        for given in ((), (0.5,), ([torch.full((2, 2), 0.5)],)):
            try:
                getattr(torch, name)(own, *given)
            except (RuntimeError, TypeError, IndexError):
                continue
            assert own[0]._version > 0, name
            counted += 1
            break
    assert counted > 30


def _schema(name: str) -> Any:
    return getattr(torch.ops.aten, name).default._schema


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
    ],
)
def test_fused_steps_of_torch_reach_the_weight_or_are_refused(
    kind: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(8, 8)
    model = copy.deepcopy(stock)
    model, _ = oxytorch.optimize(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.bfloat16
    )
    ours, theirs = (kind(m.parameters(), fused=True, **options) for m in (model, stock))
    for _ in range(3):
        for own, plain in zip(model.parameters(), stock.parameters(), strict=True):
            own.grad = torch.randn(own.shape).bfloat16()
            plain.grad = own.grad.float()
        theirs.step()
        if "momentum" in options:  # which torch keeps in the dtype of gradients
            with pytest.raises(TypeError, match="give the optimizer to"):
                ours.step()
            return
        ours.step()
    for own, plain in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(own.detach().clone(), plain)


# Kept values.

KEPT: dict[str, Callable[[Any], Any]] = {
    "data": lambda model: model.head.weight.data,
    "detach": lambda model: model.head.weight.detach(),
    "state_dict": lambda model: model.state_dict()["head.weight"],
    "view": lambda model: model.head.weight.data.view(-1),
    "transposed": lambda model: model.head.weight.detach().t(),
}


def _steps(model: Any, optimizer: Any) -> None:
    for seed in range(3):
        step(model, optimizer, seed=seed)


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("reads", [True, False])
def test_values_that_are_set_aside_stay_as_they_were(
    keep: Callable[[Any], Any], reads: bool
) -> None:
    model, optimizer = pair()
    _steps(model, optimizer)
    kept = keep(model)
    wanted = weights(model)["head.weight"]
    model.head.weight.data = torch.zeros(3, 8)
    _steps(model, optimizer)
    if reads:
        kept.sum()
    shown = {"view": lambda v: v.view(3, 8), "transposed": lambda v: v.t()}
    shape = next((shown[name] for name in shown if KEPT[name] is keep), lambda v: v)
    assert torch.equal(shape(kept), wanted)
    moved = weights(model)["head.weight"]
    model.head.weight.data = shape(kept)
    _assert_is_weight(model, optimizer, wanted)
    assert not torch.equal(moved, wanted)


@pytest.mark.parametrize("keep", [KEPT["data"], KEPT["detach"], KEPT["state_dict"]])
def test_values_that_are_brought_back_are_the_weight_again(keep: Callable[[Any], Any]) -> None:
    model, optimizer = pair()
    kept = keep(model)
    part = kept.view(-1)[3:9]
    for _ in range(2):
        model.head.weight.data = torch.full((3, 8), 1 / 3)
        _steps(model, optimizer)
        model.head.weight.data = kept
        _steps(model, optimizer)
        assert torch.equal(kept, weights(model)["head.weight"])
        part.mul_(0.9999)
        assert torch.equal(part, weights(model)["head.weight"].view(-1)[3:9])
    _assert_is_weight(model, optimizer, kept.clone())


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "data.add_": lambda model, optimizer: model.head.weight.data.add_(1 / 3),
    "data.copy_": lambda model, optimizer: model.head.weight.data.copy_(torch.ones(3, 8) / 3),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(
        {name: value / 3 for name, value in model.state_dict().items()}
    ),
    "init": lambda model, optimizer: nn.init.normal_(model.head.weight),
    "set_master_weight": lambda model, optimizer: optimizer.set_master_weight(
        model.head.weight, torch.ones(3, 8) / 3
    ),
    "own data": lambda model, optimizer: setattr(model.head.weight, "data", model.head.weight.data),
    "optimizer loads": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "undo": lambda model, optimizer: oxytorch.undo(model),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("keep", [KEPT["data"], KEPT["detach"], KEPT["state_dict"]])
def test_values_follow_the_weight(
    change: Callable[[Any, Any], Any], keep: Callable[[Any], Any]
) -> None:
    model, optimizer = pair()
    _steps(model, optimizer)
    kept = keep(model)
    change(model, optimizer)
    assert torch.equal(kept, weights(model)["head.weight"])
    if type(model.head.weight) is SplitParameter:
        _steps(model, optimizer)
        assert torch.equal(kept, weights(model)["head.weight"])
        assert not torch.equal(kept, kept.bfloat16().float())
    with torch.no_grad():
        model.head.weight.mul_(0.9999)
    assert torch.equal(kept, weights(model)["head.weight"])


def test_weights_are_exchanged() -> None:
    """As an average is stored and restored, and as two layers are swapped."""
    model, optimizer = pair()
    _steps(model, optimizer)
    first, second = model.body[3].weight, model.projection
    wanted = first.detach().clone(), second.detach().clone()
    kept = first.data
    first.data = second.data
    second.data = kept
    assert torch.equal(first.detach(), wanted[1])
    assert torch.equal(second.detach(), wanted[0])
    _steps(model, optimizer)
    assert torch.equal(kept, second.detach())
    assert not torch.equal(first.detach(), second.detach())
    # What another parameter has is copied.
    first.data = second.data
    before = second.detach().clone()
    with torch.no_grad():
        first.mul_(2)
    assert torch.equal(second.detach(), before)


def test_parameters_are_swapped_with_their_halves() -> None:
    model, optimizer = pair()
    _steps(model, optimizer)
    first, second = model.body[3].weight, model.projection
    wanted = first.detach().clone(), second.detach().clone()
    optimizer.zero_grad()
    torch.utils.swap_tensors(first, second)
    assert torch.equal(first.detach(), wanted[1])
    assert torch.equal(second.detach(), wanted[0])
    plain = nn.Linear(3, 3)
    optim.AdamW(plain.parameters())
    torch.utils.swap_tensors(plain.weight, nn.Parameter(torch.ones(3, 3)))
    assert torch.equal(plain.weight, torch.ones(3, 3))


def test_a_shallow_copy_of_the_optimizer_steps_the_same_weights() -> None:
    model, optimizer = pair()
    _steps(model, optimizer)
    wanted = weights(model)
    other = copy.copy(optimizer)
    assert_weights(model, wanted)
    step(model, other)
    assert not torch.equal(model.head.weight.detach(), wanted["head.weight"])


@pytest.mark.parametrize("of", ["model", "parameter", "storage"])
def test_shared_memory_keeps_every_bit(of: str) -> None:
    model, optimizer = pair()
    _steps(model, optimizer)
    wanted = weights(model)
    if of == "model":
        model.share_memory()
    elif of == "parameter":
        model.head.weight.share_memory_()
    else:
        model.head.weight.untyped_storage().share_memory_()
    assert model.head.weight.is_shared()
    assert_weights(model, wanted)
    assert torch.equal(optimizer.master_weight(model.head.weight), wanted["head.weight"])


def test_arrays_are_of_their_moment() -> None:
    model, optimizer = pair()
    array = model.head.weight.detach().numpy()
    before = array.copy()
    _steps(model, optimizer)
    assert not torch.equal(model.head.weight.detach(), torch.from_numpy(before))
    assert (array == before).all()
