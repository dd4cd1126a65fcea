"""`optimize` leaves the original, the sample and the random numbers as they were, and its copies
are copies as `copy.deepcopy` makes them."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oxytorch
from oxytorch.optimize import DEFAULT, PASSES

WIDTH = 8


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Stateful(nn.Module):
    """A layer whose forward does `change` to the module and its input first."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH, max_norm=0.1)
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(6, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.memory: Any = None
        self.count = 0
        self.list: list[Any] = []
        self.nested: dict[str, Any] = {"inner": {"calls": 0}, "rows": [torch.zeros(2, WIDTH)]}
        self.last: deque[Any] = deque([1, 2], maxlen=2)
        self.seen: set[int] = set()
        self.slots = Slots()
        self.space = SimpleNamespace(calls=0)
        self.generator = torch.Generator().manual_seed(3)
        self.random = random.Random(3)
        self.numpy_random = numpy.random.default_rng(3)
        self.array = numpy.zeros(3)
        self.hidden = torch.zeros(2, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return F.relu(self.layer(x))


def _learns(m: Any, x: torch.Tensor) -> None:
    with torch.enable_grad():
        m.optimizer.zero_grad()
        m.layer(x.detach().clone()).sum().backward()
        m.optimizer.step()
        m.optimizer.zero_grad()


CHANGES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "buffer": lambda m, x: m.step.add_(1),
    "buffer_replaced": lambda m, x: setattr(m, "step", m.step + 1),
    "buffer_of_other_memory": lambda m, x: setattr(m.step, "data", m.step.data + 1),
    "buffer_through_numpy": lambda m, x: m.cache.numpy().__setitem__(0, 5.0),
    "cache": lambda m, x: m.cache.index_copy_(0, torch.tensor([m.count]), x[:1]),
    "cache_slice": lambda m, x: m.cache[1:3].copy_(x[:2]),
    "statistics": lambda m, x: F.batch_norm(x, m.mean, m.variance, training=True),
    "max_norm": lambda m, x: m.table(torch.tensor([1, 2])),
    "weight": lambda m, x: m.layer.weight.mul_(0.5),
    "weight_data": lambda m, x: m.layer.weight.data.mul_(0.5),
    "optimizer": _learns,
    "memory": lambda m, x: setattr(m, "memory", x if m.memory is None else m.memory + x),
    "hidden": lambda m, x: m.hidden.add_(1),
    "count": lambda m, x: setattr(m, "count", m.count + 1),
    "new_attribute": lambda m, x: setattr(m, f"made{len(m.__dict__)}", 1),
    "deleted_attribute": lambda m, x: m.__dict__.pop("memory", None),
    "new_buffer": lambda m, x: m.register_buffer("late", x.clone()),
    "list": lambda m, x: m.list.append(x),
    "dictionary": lambda m, x: m.nested["inner"].update(calls=m.nested["inner"]["calls"] + 1),
    "tensor_in_list": lambda m, x: m.nested["rows"][0].add_(x[:2]),
    "deque": lambda m, x: m.last.append(x),
    "set": lambda m, x: m.seen.add(len(m.seen)),
    "slots": lambda m, x: setattr(m.slots, "count", m.slots.count + 1),
    "namespace": lambda m, x: setattr(m.space, "calls", m.space.calls + 1),
    "generator": lambda m, x: torch.rand(2, generator=m.generator),
    "python_generator": lambda m, x: m.random.random(),
    "numpy_generator": lambda m, x: m.numpy_random.random(),
    "array": lambda m, x: m.array.__setitem__(0, m.array[0] + 1),
    "input": lambda m, x: x.add_(1),
    "input_slice": lambda m, x: x[0].zero_(),
    "layer_attribute": lambda m, x: setattr(m.layer, "calls", getattr(m.layer, "calls", 0) + 1),
    "training_mode": lambda m, x: m.table.train(not m.table.training),
}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "inplace": {"inplace": True},
    "all": {"passes": [p for p in PASSES if p != "program"], "verify": True},
    "all_inplace": {
        "passes": [p for p in PASSES if p != "program"],
        "verify": True,
        "inplace": True,
    },
    "bfloat16": {"dtype": torch.bfloat16},
    "tune": {"tune": True},
}


def _shown(value: Any, depth: int = 0) -> Any:
    """Everything that a model holds, as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().float().tolist()
    if isinstance(value, nn.Module):
        kept = ("_forward_hooks", "forward", "_apply", "_oxytorch", "change", "_state_dict_hooks")
        return {n: _shown(v) for n, v in value.__dict__.items() if n not in kept}
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.optim.Optimizer):
        return _shown(value.state_dict())
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return [_shown(item) for item in value]
    if isinstance(value, Slots):
        return value.count
    if isinstance(value, SimpleNamespace):
        return vars(value).copy()
    return value.tolist() if isinstance(value, numpy.ndarray) else repr(value)


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("change", [*CHANGES])
def test_runs_on_the_sample_leave_no_trace(change: str, way: str) -> None:
    torch.manual_seed(0)
    model = Stateful(CHANGES[change]).eval()
    with torch.no_grad():
        model.layer.weight.copy_(model.layer.weight.bfloat16())  # which a conversion keeps
        model.layer.bias.copy_(model.layer.bias.bfloat16())
        model.table.weight.copy_(model.table.weight.bfloat16())
    sample = torch.ones(4, WIDTH)
    before, stock = _shown(model), copy.deepcopy(model)
    numbers, drawn = torch.get_rng_state(), random.getstate()
    optimized = oxytorch.optimize(model, sample_input=sample, **WAYS[way])
    assert torch.equal(sample, torch.ones(4, WIDTH))
    assert torch.equal(torch.get_rng_state(), numbers) and random.getstate() == drawn
    shown = _shown(optimized)
    if optimized is not model:
        assert _shown(model) == before
    assert _shown(optimized) == before
    assert shown == before
    if way == "bfloat16":
        return
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(4, WIDTH)
            torch.testing.assert_close(optimized(x.clone()), stock(x.clone()))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_sample_that_does_not_fit_leaves_no_trace(inplace: bool) -> None:
    model = Stateful(lambda m, x: (m.step.add_(1), m.list.append(x))).eval()
    before = _shown(model)
    with pytest.raises(ValueError, match="sample_input does not fit"):
        oxytorch.optimize(model, sample_input=torch.zeros(4, 3), inplace=inplace)
    assert _shown(model) == before


def test_a_sample_of_objects_is_as_it_was() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
            cache["rows"].append(self.layer(x))
            cache["total"] += x
            return torch.cat(cache["rows"])

    total = torch.zeros(2, WIDTH)
    cache = {"rows": [torch.zeros(2, WIDTH)], "total": total}
    oxytorch.optimize(Model().eval(), sample_input=(torch.ones(2, WIDTH), cache), verify=True)
    assert len(cache["rows"]) == 1 and cache["total"] is total and not total.any()


def test_code_that_only_looks_like_an_activation_runs_unseen() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * torch.sigmoid(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting()).eval()
    optimized = oxytorch.optimize(model, inplace=True)
    assert optimized[1].calls == 0


@dataclass
class Holder:
    weight: Any


class Elsewhere(nn.Module):
    """A layer whose parameters and buffer are also held in other places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        weight = self.layer.weight
        self.list = [weight, self.norm.running_mean]
        self.tuple = (weight,)
        self.dict = {"w": weight}
        self.deque = deque([weight])
        self.holder = Holder(weight)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.hooked: Any
        object.__setattr__(self, "hooked", self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) + F.linear(x, self.list[0])

    def held(self) -> list[bool]:
        own = self.layer.weight
        holders = (self.list[0], self.tuple[0], self.dict["w"], self.deque[0], self.holder.weight)
        found = [held is own for held in (*holders, self.optimizer.param_groups[0]["params"][0])]
        bias = self.hooked is self.layer.bias
        return [*found, bias, self.list[1] is self.norm.running_mean]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("passes", ["default", "all"])
@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_held_elsewhere_stay_the_models(dtype: Any, passes: str, inplace: bool) -> None:
    torch.manual_seed(0)
    model = Elsewhere().eval()
    stock = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    optimized = oxytorch.optimize(
        model,
        dtype=dtype,
        sample_input=x,
        passes=[p for p in PASSES if p != "program"] if passes == "all" else [*DEFAULT],
        inplace=inplace,
    )
    assert all(optimized.held())
    for each in (stock, optimized):
        each.load_state_dict({name: value * 3 for name, value in each.state_dict().items()})
        each.optimizer.zero_grad()
        each(x.to(each.layer.weight.dtype) if dtype else x).float().sum().backward()
        each.optimizer.step()
    tolerance = {} if dtype is None else {"rtol": 0.1, "atol": 0.3}
    with torch.no_grad():
        found = optimized(x).float()
    torch.testing.assert_close(found, stock(x).detach(), **tolerance)
    oxytorch.undo(optimized)
    assert all(optimized.held())
    if not inplace:
        assert not {p.data_ptr() for p in model.parameters()} & {
            p.data_ptr() for p in optimized.parameters()
        }


def test_a_copy_has_gradients_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval()
    model(torch.ones(2, WIDTH)).sum().backward()
    optimized = oxytorch.optimize(model)
    assert torch.equal(optimized[0].weight.grad, model[0].weight.grad)
    optimized[0].weight.grad.zero_()
    assert model[0].weight.grad.any()


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_may_have_another_dtype_than_their_parameters(inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval()
    model[0].weight.grad_dtype = torch.bfloat16
    model[0].bias.grad_dtype = None
    model[0].bias.grad = torch.ones(WIDTH, dtype=torch.float64)
    model(torch.ones(2, WIDTH)).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for dtype in (torch.bfloat16, None):
        optimized = oxytorch.optimize(model, inplace=inplace, dtype=dtype)
        for parameter, gradient in zip(optimized.parameters(), wanted, strict=True):
            assert torch.equal(parameter.grad.double(), gradient.double())
        oxytorch.undo(optimized)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad.double(), gradient.double())


@pytest.mark.parametrize("passes", [["cast"], [*DEFAULT], ["channels_last"]])
def test_writes_to_the_copy_do_not_reach_the_original(passes: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(1, 3, 6, 6)
    model.eval()(x)
    before = copy.deepcopy(model.state_dict())
    versions = [p._version for p in model.parameters()]
    optimized = oxytorch.optimize(model, sample_input=x, passes=passes)
    with torch.no_grad():
        for tensor in (*optimized.parameters(), *optimized.buffers()):
            tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]


@pytest.mark.parametrize("inplace", [False, True])
def test_lazy_layers_are_refused_before_their_first_input(inplace: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU()).eval()
    x = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match=r"lazy layer .*0\.weight.*call the model once"):
        oxytorch.optimize(model, sample_input=x, inplace=inplace)
    assert type(model[0]) is nn.LazyLinear
    expected = model(x)
    optimized = oxytorch.optimize(model, sample_input=x, inplace=inplace)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), expected.detach())


def test_lazy_layers_are_refused_in_training_too() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with pytest.raises(ValueError, match=r"lazy layer .*0\.weight.*call the model once"):
        oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)
    assert type(model[0]) is nn.LazyLinear and type(optimizer) is torch.optim.AdamW
