"""A forward reads things that are no tensors of the model; they change between calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .compare import Log

SETTINGS = {"scale": 1.0}
SCALE = 1.0
TABLE = torch.ones(12)
SWITCHES: list[bool] = [False]


@functools.cache
def cached_table(size: int) -> torch.Tensor:
    return torch.ones(size)


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


class Part(nn.Module):
    """One layer, and all kinds of state around it."""

    KIND_SCALE = 1.0
    SHARED = torch.ones(12)

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.config = SimpleNamespace(scale=1.0, nested=SimpleNamespace(flag=False))
        self.scales, self.options = [1.0, 2.0], {"scale": 1.0}
        self.constant, self.constants = torch.ones(12), [torch.ones(12), torch.ones(12)]
        self.named = {"table": torch.ones(12)}
        self.function: Callable[[torch.Tensor], torch.Tensor] = F.relu
        self.parts: Any = (self.l,)
        self.register_buffer("buffer", torch.ones(12))
        self.register_buffer("passing", torch.ones(12), persistent=False)
        self._hidden = 1.0
        self.number, self.word, self.size = 1.0, "relu", torch.Size([12])

    @property
    def hidden(self) -> float:
        return self._hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


Reader = Callable[[Any, torch.Tensor], Any]
Writer = Callable[[Any], Any]
STATES: dict[str, tuple[Reader, Writer]] = {}


def _h(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.relu(self.l(x))


def _state(name: str, read: Reader, write: Writer) -> None:
    STATES[name] = read, write


def _set(target: Any, name: Any, value: Any) -> None:
    if isinstance(target, (dict, list)):
        target[name] = value
    else:
        setattr(target, name, value)


def _attribute(name: str, target: Callable[[Any], Any], key: Any, value: Any, other: Any) -> None:
    """A number or word that the forward multiplies by; `write` sets another one."""

    def read(self: Any, x: torch.Tensor) -> Any:
        owner = target(self)
        found = owner[key] if isinstance(owner, (dict, list)) else getattr(owner, key)
        return _h(self, x) * (found if not isinstance(found, str) else len(found))

    _state(name, read, lambda self: _set(target(self), key, other))


_attribute("number", lambda m: m, "number", 1.0, 0.5)
_attribute("word", lambda m: m, "word", "relu", "no")
_attribute("config", lambda m: m.config, "scale", 1.0, 0.5)
_attribute("nested_config", lambda m: m.config.nested, "flag", False, True)
_attribute("list", lambda m: m.scales, 0, 1.0, 0.5)
_attribute("dictionary", lambda m: m.options, "scale", 1.0, 0.5)
_attribute("class_attribute", lambda m: type(m), "KIND_SCALE", 1.0, 0.5)
_attribute("own_over_class_attribute", lambda m: m, "KIND_SCALE", 1.0, 0.25)
_attribute("global_dictionary", lambda m: SETTINGS, "scale", 1.0, 0.5)
_attribute("plain_constant_replaced", lambda m: m, "constant", 0, torch.full((12,), 0.5))
_attribute("constant_in_list_replaced", lambda m: m.constants, 1, 0, torch.full((12,), 0.5))
_attribute("constant_in_dictionary", lambda m: m.named, "table", 0, torch.full((12,), 0.5))
_attribute("buffer_replaced", lambda m: m, "buffer", 0, torch.full((12,), 0.5))
_attribute("class_tensor_replaced", lambda m: type(m), "SHARED", 0, torch.full((12,), 0.5))

_state("property", lambda m, x: _h(m, x) * m.hidden, lambda m: setattr(m, "_hidden", 0.5))
_state("vars", lambda m, x: _h(m, x) * vars(m)["number"], lambda m: vars(m).update(number=0.5))
_state("global", lambda m, x: _h(m, x) * SCALE, lambda m: globals().update(SCALE=0.5))
_state(
    "environment",
    lambda m, x: _h(m, x) * (0.5 if os.environ.get("USES_HALF") else 1),
    lambda m: os.environ.update(USES_HALF="1"),
)
_state(
    "switch_in_a_list",
    lambda m, x: -_h(m, x) if SWITCHES[0] else _h(m, x),
    lambda m: SWITCHES.__setitem__(0, True),
)
_state(
    "function_attribute",
    lambda m, x: m.function(m.l(x)),
    lambda m: setattr(m, "function", torch.tanh),
)
_state(
    "helper_replaced",
    lambda m, x: globals()["helper"](m.l(x)),
    lambda m: globals().update(helper=torch.tanh),
)
_state(
    "functional_replaced",
    lambda m, x: F.relu(m.l(x)),
    lambda m: setattr(F, "relu", torch.tanh),
)
_state(
    "tuple_of_parts",
    lambda m, x: F.relu(m.parts[0](x)),
    lambda m: setattr(m, "parts", (nn.Linear(12, 12),)),
)
_state("constant_written", lambda m, x: _h(m, x) * m.constant, lambda m: m.constant.mul_(0.5))
_state(
    "constant_written_by_data",
    lambda m, x: _h(m, x) * m.constant,
    lambda m: m.constant.data.mul_(0.5),
)
_state(
    "constant_written_by_numpy",
    lambda m, x: _h(m, x) * m.constant,
    lambda m: m.constant.numpy().fill(0.5),
)
_state(
    "constant_in_list_written",
    lambda m, x: _h(m, x) * m.constants[1],
    lambda m: m.constants[1].mul_(0.5),
)
_state(
    "list_of_constants_grown",
    lambda m, x: sum(_h(m, x) * c for c in m.constants),
    lambda m: m.constants.append(torch.ones(12)),
)
_state("global_tensor_written", lambda m, x: _h(m, x) * TABLE, lambda m: TABLE.mul_(0.5))
_state(
    "global_tensor_replaced",
    lambda m, x: _h(m, x) * globals()["TABLE"],
    lambda m: globals().update(TABLE=torch.full((12,), 0.5)),
)
_state(
    "cached_tensor_written",
    lambda m, x: _h(m, x) * cached_table(12),
    lambda m: cached_table(12).mul_(0.5),
)
_state("class_tensor_written", lambda m, x: _h(m, x) * m.SHARED, lambda m: m.SHARED.mul_(0.5))
for _name in ("buffer", "passing"):
    _state(
        f"{_name}_written",
        lambda m, x, name=_name: _h(m, x) * getattr(m, name),
        lambda m, name=_name: getattr(m, name).mul_(0.5),
    )
    _state(
        f"{_name}_written_by_data",
        lambda m, x, name=_name: _h(m, x) * getattr(m, name),
        lambda m, name=_name: getattr(m, name).data.mul_(0.5),
    )
    _state(
        f"{_name}_written_by_numpy",
        lambda m, x, name=_name: _h(m, x) * getattr(m, name),
        lambda m, name=_name: getattr(m, name).numpy().fill(0.5),
    )
_state(
    "buffer_value_read",
    lambda m, x: _h(m, x) * float(m.buffer[0]),
    lambda m: m.buffer.mul_(0.5),
)
_state(
    "buffer_value_branched_on",
    lambda m, x: _h(m, x) if m.buffer[0] > 0.7 else -_h(m, x),
    lambda m: m.buffer.mul_(0.5),
)
_state(
    "weight_value_branched_on",
    lambda m, x: _h(m, x) if m.l.weight.sum() > -1e9 else -_h(m, x),
    lambda m: m.l.weight.data.fill_(-1e9),
)
_state(
    "norm_weight_by_data",
    lambda m, x: m.norm(x + m.l(x)),
    lambda m: m.norm.weight.data.mul_(0.5),
)
_state(
    "norm_weight_by_numpy",
    lambda m, x: m.norm(x + m.l(x)),
    lambda m: m.norm.weight.detach().numpy().fill(0.5),
)
_state(
    "bias_by_numpy",
    lambda m, x: _h(m, x),
    lambda m: m.l.bias.detach().numpy().fill(0.5),
)
_state(
    "norm_weight_used_elsewhere",
    lambda m, x: _h(m, x) * (m.norm.weight + 1),
    lambda m: m.norm.weight.data.mul_(0.5),
)
_state(
    "default_dtype",
    lambda m, x: _h(m, x) * torch.ones(12).to(torch.get_default_dtype()),
    lambda m: None,
)
_state(
    "forward_of_the_class",
    lambda m, x: _h(m, x),
    lambda m: setattr(type(m), "forward", lambda self, x: self.l(x) * 3),
)
_state(
    "forward_of_linear",
    lambda m, x: _h(m, x),
    lambda m: setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 3),
)
_state(
    "forward_of_layer_norm",
    lambda m, x: m.norm(x + m.l(x)),
    lambda m: setattr(nn.LayerNorm, "forward", lambda self, x: x * 3),
)
_state(
    "call_of_module",
    lambda m, x: _h(m, x),
    lambda m: setattr(nn.Linear, "__call__", lambda self, x: self.forward(x) * 3),
)
_state(
    "linear_replaced_in_functional",
    lambda m, x: F.relu(m.l(x)),
    lambda m: setattr(F, "linear", lambda x, w, b=None: (x @ w.t()) * 3),
)


class Whole(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(12, 12), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(F.relu(self.first(x)))


@pytest.fixture(autouse=True)
def _everything_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take back what a use has changed in modules and classes that other tests share."""
    yield
    _take_back()


_ORIGINAL = (nn.Linear.forward, nn.LayerNorm.forward, F.relu, F.linear)


def _take_back() -> None:
    nn.Linear.forward, nn.LayerNorm.forward = _ORIGINAL[:2]
    F.relu, F.linear = _ORIGINAL[2:]
    if "__call__" in vars(nn.Linear):
        del nn.Linear.__call__
    SETTINGS["scale"], SWITCHES[0] = 1.0, False
    os.environ.pop("USES_HALF", None)
    globals().update(SCALE=1.0, TABLE=torch.ones(12), helper=lambda x: F.relu(x))
    cached_table.cache_clear()


@pytest.mark.parametrize("form", ["default", "sample", "program"])
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("name", [*STATES])
def test_hidden_state(check: Callable[..., None], name: str, whole: bool, form: str) -> None:
    read, write = STATES[name]

    def build() -> nn.Module:
        _take_back()
        kind = type("Reading", (Part,), {"forward": lambda self, x: read(self, x)})
        kind.SHARED = torch.ones(12)
        part = kind()
        return (Whole(part) if whole else part).eval()

    def sample() -> torch.Tensor:
        return torch.randn(3, 12, generator=torch.Generator().manual_seed(5))

    def use(model: Any, log: Log) -> None:
        part = model.part if whole else model
        x = sample()
        with torch.no_grad():
            for _ in range(3):
                log(model(x))
            torch.manual_seed(2)
            write(part)
            for _ in range(3):
                log(model(x))
            log(model(x[:1]))
        _take_back()

    check(build, use, form, sample)
