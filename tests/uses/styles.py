"""Models in the styles in which people write `forward`, each of which once broke or could break."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import random
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

STYLES: dict[str, Callable[[], nn.Module]] = {}
GLOBAL_SCALE = 1.0
CALLS: list[float] = []


class Pair(NamedTuple):
    """A named tuple output."""

    first: torch.Tensor
    second: torch.Tensor | None


@dataclasses.dataclass
class Answer:
    """A dataclass output."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Named(collections.OrderedDict):  # type: ignore[type-arg]
    """A dict subclass with attributes, as many libraries have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Base(nn.Module):
    """Three layers and some state for the forwards below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.act, self.drop = nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.5)
        self.inplace = nn.ReLU(inplace=True)
        self.calls, self.scale, self.flag = 0, 0.5, True
        self.last: Any = None
        self.history: list[Any] = []
        self.cache: dict[Any, Any] = {}
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))


def style(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Register a model whose forward is the function, alone and as a part of a larger one."""
    name = forward.__name__.strip("_")
    kind = type(name, (Base,), {"forward": forward, "__module__": __name__})
    setattr(sys.modules[__name__], name, kind)
    STYLES[name] = lambda: kind().eval()
    return forward


def relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


@style
def _plain(self: Any, x: Any) -> Any:
    return F.relu(self.a(x))


@style
def _isinstance_check(self: Any, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        x = x[0]
    return F.relu(self.a(x))


@style
def _exact_type_check(self: Any, x: Any) -> Any:
    if type(x) is not torch.Tensor:
        x = x * 0
    return F.relu(self.a(x))


@style
def _try_except(self: Any, x: Any) -> Any:
    try:
        big = bool((x.abs() > 1e9).any())
    except Exception:
        big = True
    return F.relu(self.a(x)) * (0 if big else 1)


@style
def _try_view(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    try:
        return h.view(7, -1)
    except RuntimeError:
        return h * 2


@style
def _try_attribute(self: Any, x: Any) -> Any:
    try:
        return self.absent(x)
    except AttributeError:
        return F.relu(self.a(x))


@style
def _no_grad_inside(self: Any, x: Any) -> Any:
    with torch.no_grad():
        y = F.relu(self.a(x))
    return F.relu(self.b(y))


@style
def _enable_grad_inside(self: Any, x: Any) -> Any:
    with torch.enable_grad():
        y = F.relu(self.a(x))
    return y, y.requires_grad


@style
def _gradient_inside(self: Any, x: Any) -> Any:
    """An energy model: the answer is a gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = F.silu(self.a(x)).sum()
        (force,) = torch.autograd.grad(energy, x)
    return energy.detach(), force


@style
def _autocast_inside(self: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.relu(self.a(x))


@style
def _autocast_off_inside(self: Any, x: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return F.relu(self.a(x.float()))


@style
def _inference_mode_inside(self: Any, x: Any) -> Any:
    with torch.inference_mode():
        y = F.relu(self.a(x))
    return y.clone(), y.is_inference()


@style
def _writes_attributes(self: Any, x: Any) -> Any:
    self.calls += 1
    self.last = F.relu(self.a(x))
    return self.last * 2


@style
def _writes_a_list(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    self.history.append(h)
    return h + len(self.history)


@style
def _writes_a_dictionary(self: Any, x: Any) -> Any:
    key = x.shape[0]
    if key not in self.cache:
        self.cache[key] = F.relu(self.a(x)).mean(0)
    return F.relu(self.b(x)) + self.cache[key]


@style
def _writes_a_global_list(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    CALLS.append(1.0)
    return h * (1 + 0.1 * len(CALLS))


@style
def _writes_a_buffer(self: Any, x: Any) -> Any:
    self.counter += 1
    self.mean.mul_(0.9).add_(x.reshape(-1, 12).mean(0), alpha=0.1)
    return F.relu(self.a(x)) - self.mean + self.counter


@style
def _assigns_a_buffer(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    self.mean = h.reshape(-1, 12).mean(0)
    return h - self.mean


@style
def _writes_its_input(self: Any, x: Any) -> Any:
    x += self.a(x)
    return F.relu(x)


@style
def _writes_its_input_in_place(self: Any, x: Any) -> Any:
    x.mul_(0.5).clamp_(min=-1)
    return F.relu(self.a(x))


@style
def _writes_a_slice_of_its_input(self: Any, x: Any) -> Any:
    x[..., 0] = 0
    return F.relu(self.a(x))


@style
def _writes_a_clone(self: Any, x: Any) -> Any:
    x = x.clone()
    x[..., 0] = 0
    return F.relu(self.a(x))


@style
def _returns_its_input(self: Any, x: Any) -> Any:
    return x, F.relu(self.a(x))


@style
def _returns_a_view_of_its_input(self: Any, x: Any) -> Any:
    return x.transpose(-1, -2), x.detach()[..., :3], F.relu(self.a(x))


@style
def _returns_a_parameter(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)), self.a.weight, self.mean


@style
def _uses_the_weight(self: Any, x: Any) -> Any:
    return F.relu(F.linear(x, self.a.weight * 2, self.a.bias)) @ self.b.weight.t()


@style
def _slices_the_weight(self: Any, x: Any) -> Any:
    return F.linear(x, self.a.weight[:6], self.a.bias[:6]), self.a.weight.data.norm()


@style
def _in_place_activation_used_again(self: Any, x: Any) -> Any:
    h = self.a(x)
    return self.inplace(h) * h


@style
def _in_place_silu_used_again(self: Any, x: Any) -> Any:
    h = self.a(x)
    return F.silu(h, inplace=True) * h


@style
def _in_place_through_a_view(self: Any, x: Any) -> Any:
    h = self.a(x)
    v = h.view(-1)
    self.inplace(h)
    return v * 2


@style
def _in_place_on_the_input(self: Any, x: Any) -> Any:
    return self.b(self.inplace(x)) + x


@style
def _in_place_methods(self: Any, x: Any) -> Any:
    h = self.a(x)
    g = h
    h.relu_().add_(1).mul_(x)
    return g + torch.sigmoid_(h)


@style
def _random_factor(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * random.random()


@style
def _numpy_random(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * float(np.random.rand())


@style
def _torch_random(self: Any, x: Any) -> Any:
    return F.relu(self.a(x + 0.1 * torch.randn_like(x)))


@style
def _functional_dropout(self: Any, x: Any) -> Any:
    return F.dropout(F.relu(self.a(x)), 0.5, training=True)


@style
def _functional_dropout_of_the_mode(self: Any, x: Any) -> Any:
    return F.dropout(F.relu(self.a(x)), 0.5, self.training)


@style
def _bernoulli(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * torch.bernoulli(torch.full_like(x, 0.5))


@style
def _generator_given(self: Any, x: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return F.relu(self.a(x)) + torch.randn(x.shape, generator=generator)


@style
def _branch_on_values(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    if h.sum() > 20:
        return self.b(h)
    return h


@style
def _branch_on_item(self: Any, x: Any) -> Any:
    if x.max().item() > 1.5:
        return F.relu(self.a(x)) * x.max().item()
    return F.gelu(self.b(x))


@style
def _loop_on_values(self: Any, x: Any) -> Any:
    h, steps = F.relu(self.a(x)), 0
    while h.norm() > 1 and steps < 20:
        h, steps = h * 0.5, steps + 1
    return h, steps


@style
def _nonzero_indices(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return h[h.sum(-1) > 1], torch.nonzero(h > 0.5)


@style
def _branch_on_shape(self: Any, x: Any) -> Any:
    if x.shape[0] > 4:
        x = x * 2
    return F.relu(self.a(x))


@style
def _branch_on_flag(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) if self.flag else F.silu(self.a(x))


@style
def _branch_on_training(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) if not self.training else x


@style
def _branch_on_grad_mode(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * (2 if torch.is_grad_enabled() else 1)


@style
def _branch_on_requires_grad(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return h * 3 if h.requires_grad else h


@style
def _reads_a_global(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * GLOBAL_SCALE


@style
def _reads_an_attribute(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * self.scale


@style
def _reads_numpy(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return torch.from_numpy(np.sqrt(h.detach().numpy())) + h


@style
def _reads_tolist(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return h + sum(v for v in h.detach().flatten().tolist())


@style
def _new_tensor_of_values(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * torch.tensor([float(v) for v in x.reshape(-1)[:12]])


@style
def _prints(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    print("shape", tuple(h.shape), float(h.sum()) > 0)
    return h


@style
def _asserts(self: Any, x: Any) -> Any:
    assert x.dim() >= 2 and x.size(-1) == 12, f"bad shape {x.shape}"
    torch._assert(x.shape[-1] == 12, "bad shape")
    return F.relu(self.a(x))


@style
def _hasattr_checks(self: Any, x: Any) -> Any:
    extra = x.extra if hasattr(x, "extra") else 0
    return F.relu(self.a(x)) + extra + (1 if hasattr(x, "shape") else 0)


@style
def _getattr_of_input(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * getattr(x, "weighting", 1.0)


@style
def _marks_its_output(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    h.note = 3
    return h, h.note


@style
def _dictionary_output(self: Any, x: Any) -> Any:
    return {"logits": F.relu(self.a(x)), "none": None, "number": 3, "nested": [x, (x,)]}


@style
def _named_output(self: Any, x: Any) -> Any:
    return Named(logits=F.relu(self.a(x)), hidden=x)


@style
def _ordered_output(self: Any, x: Any) -> Any:
    return collections.OrderedDict(out=F.relu(self.a(x)), aux=self.b(x))


@style
def _default_dictionary_output(self: Any, x: Any) -> Any:
    result: dict[str, list[Any]] = collections.defaultdict(list)
    result["h"].append(F.relu(self.a(x)))
    return result


@style
def _model_output(self: Any, x: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    h = F.relu(self.a(x))
    return BaseModelOutputWithPooling(last_hidden_state=h, pooler_output=h.mean(1))


@style
def _named_tuple_output(self: Any, x: Any) -> Any:
    return Pair(F.relu(self.a(x)), None)


@style
def _dataclass_output(self: Any, x: Any) -> Any:
    return Answer(F.relu(self.a(x)), x)


@style
def _local_class_output(self: Any, x: Any) -> Any:
    @dataclasses.dataclass
    class Local:
        out: torch.Tensor

    return Local(F.relu(self.a(x))).out


@style
def _namespace_output(self: Any, x: Any) -> Any:
    return vars(types.SimpleNamespace(out=F.relu(self.a(x))))


@style
def _torch_return_type(self: Any, x: Any) -> Any:
    return torch.max(F.relu(self.a(x)), dim=-1)


@style
def _topk_output(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)).topk(3, dim=-1)


@style
def _set_and_none_output(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)), None, True, "text", 1.5, frozenset({1})


@style
def _no_output(self: Any, x: Any) -> Any:
    self.last = F.relu(self.a(x))


@style
def _number_output(self: Any, x: Any) -> Any:
    return float(F.relu(self.a(x)).sum())


@style
def _list_output(self: Any, x: Any) -> Any:
    return [F.relu(self.a(part)) for part in x.unbind(0)]


@style
def _generator_output(self: Any, x: Any) -> Any:
    return tuple(F.relu(self.a(part)) for part in x.unbind(0))


@style
def _same_tensor_twice(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return h, h, [h]


def _not_called_self(this: Any, x: Any) -> Any:
    return F.relu(this.a(x))


style(_not_called_self)


def _first_called_input(input: Any, self: Any) -> Any:
    return F.relu(input.a(self))


style(_first_called_input)


@style
def _star_args(self: Any, *args: Any, **kwargs: Any) -> Any:
    return F.relu(self.a(args[0])) * kwargs.get("factor", 2)


@style
def _only_star(*args: Any) -> Any:
    self, x = args
    return F.relu(self.a(x))


@style
def _defaults(self: Any, x: Any, scale: float = 0.5, mask: Any = None, *, flag: bool = True) -> Any:
    h = F.relu(self.a(x)) * scale
    return h if flag and mask is None else h * 0


@style
def _mutable_default(self: Any, x: Any, seen: list[int] = []) -> Any:  # noqa: B006
    seen.append(1)
    return F.relu(self.a(x)) * len(seen)


@style
def _keyword_calls(self: Any, x: Any) -> Any:
    h = self.norm(input=self.act(input=self.a(input=x)))
    return self.drop(input=self.inplace(input=self.b(input=h)))


@style
def _functional_keywords(self: Any, x: Any) -> Any:
    h = F.linear(input=x, weight=self.a.weight, bias=self.a.bias)
    h = F.layer_norm(input=F.gelu(input=h, approximate="none"), normalized_shape=(12,))
    return torch.relu(input=h)


@style
def _calls_forward(self: Any, x: Any) -> Any:
    return self.act.forward(self.a.forward(x))


@style
def _calls_class_forward(self: Any, x: Any) -> Any:
    return F.relu(nn.Linear.forward(self.a, x))


@style
def _calls_super(self: Any, x: Any) -> Any:
    return super(type(self), self).__getattr__("a")(x).relu()


@style
def _shared_layer_twice(self: Any, x: Any) -> Any:
    return F.relu(self.a(F.relu(self.a(x))))


@style
def _recursion(self: Any, x: Any, depth: int = 3) -> Any:
    return x if depth == 0 else self.forward(F.relu(self.a(x)), depth - 1)


@style
def _recursion_through_call(self: Any, x: Any, depth: int = 2) -> Any:
    return x if depth == 0 else self(F.relu(self.a(x)), depth - 1)


@style
def _closure(self: Any, x: Any) -> Any:
    def inner(h: Any) -> Any:
        return F.relu(self.a(h)) + x

    return inner(inner(x))


@style
def _lambda_and_partial(self: Any, x: Any) -> Any:
    act = functools.partial(F.leaky_relu, negative_slope=0.2)
    return (lambda h: act(self.a(h)))(x)


@style
def _map_and_reduce(self: Any, x: Any) -> Any:
    return functools.reduce(lambda h, layer: F.relu(layer(h)), [self.a, self.b, self.a], x)


@style
def _getattr_by_name(self: Any, x: Any) -> Any:
    for name in ("a", "b"):
        x = getattr(torch, "relu")(getattr(self, name)(x))  # noqa: B009
    return x


@style
def _generator_inside(self: Any, x: Any) -> Any:
    def parts() -> Any:
        yield F.relu(self.a(x))
        yield F.gelu(self.b(x))

    return sum(parts())


@style
def _context_manager(self: Any, x: Any) -> Any:
    with contextlib.suppress(ValueError):
        h = F.relu(self.a(x))
        raise ValueError
    return h


@style
def _profiler_range(self: Any, x: Any) -> Any:
    with torch.profiler.record_function("part"):
        return F.relu(self.a(x))


@style
def _default_dtype_inside(self: Any, x: Any) -> Any:
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        scale = torch.tensor(0.5)
    finally:
        torch.set_default_dtype(old)
    return F.relu(self.a(x)), scale


@style
def _deterministic_inside(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * (2 if torch.are_deterministic_algorithms_enabled() else 1)


@style
def _double_inside(self: Any, x: Any) -> Any:
    return F.relu(self.a(x).double()).mean(-1), F.relu(self.a(x).half().float())


@style
def _checkpointed(self: Any, x: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda h: F.relu(self.a(h)), x, use_reentrant=False)


@style
def _own_function(self: Any, x: Any) -> Any:
    return _Clipped.apply(F.relu(self.a(x)))


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=0.5)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


@style
def _einsum(self: Any, x: Any) -> Any:
    return torch.einsum("...i,oi->...o", F.relu(self.a(x)), self.b.weight)


@style
def _addmm(self: Any, x: Any) -> Any:
    flat = x.reshape(-1, 12)
    return torch.addmm(self.a.bias, flat, self.a.weight.t()).relu()


@style
def _index_by_python(self: Any, x: Any) -> Any:
    h = F.relu(self.a(x))
    return torch.stack([h[..., i] for i in range(h.shape[-1]) if i % 2 == 0], -1)


@style
def _len_and_size(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) / len(x) / math.sqrt(x.size(-1)) + x.numel()


@style
def _f_string_of_shape(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) * len(f"{tuple(x.shape)}")


@style
def _device_and_dtype(self: Any, x: Any) -> Any:
    mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril()
    bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
    return (x @ x.transpose(-1, -2) + bias).softmax(-1) @ F.relu(self.a(x))


@style
def _lazy_layer(self: Any, x: Any) -> Any:
    """A layer that is made at the first call."""
    if not hasattr(self, "late"):
        torch.manual_seed(4)
        self.late = nn.Linear(x.shape[-1], 3)
    return self.late(F.relu(self.a(x)))


@style
def _counts_calls_of_a_part(self: Any, x: Any) -> Any:
    self.calls += 1
    return F.relu(self.a(x)) if self.calls % 2 else F.relu(self.b(x))


@style
def _key_value_cache(self: Any, x: Any) -> Any:
    old = self.cache.get("keys")
    keys = F.relu(self.a(x)) if old is None else torch.cat([old, F.relu(self.a(x))], -2)
    self.cache["keys"] = keys
    return (x @ keys.transpose(-1, -2)).softmax(-1) @ keys


@style
def _match_statement(self: Any, x: Any) -> Any:
    kind = {2: "flat", 3: "deep"}.get(x.dim())
    return F.relu(self.a(x)) if kind == "deep" else F.gelu(self.a(x))


@style
def _walrus_and_ternary(self: Any, x: Any) -> Any:
    return (h := self.a(x)) * torch.sigmoid(h) if x.dim() == 3 else self.a(x)


@style
def _operators_reversed(self: Any, x: Any) -> Any:
    return 1 - F.relu(self.a(x)) + 2 ** (-self.b(x).abs()) + (3 / (x.abs() + 1)) % 2


@style
def _comparison_with_where(self: Any, x: Any) -> Any:
    h = self.a(x)
    return torch.where(h > 0, h, h.exp() - 1), h > 0, (h > 0).float().argmax(-1)


@style
def _integer_parts(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)).round().int(), (x > 0).sum(), x.argsort(-1)


@style
def _unused_work(self: Any, x: Any) -> Any:
    F.relu(self.b(x))
    self.last = self.norm(x)
    return F.relu(self.a(x))


@style
def _raises_on_bad_values(self: Any, x: Any) -> Any:
    if torch.isnan(x).any():
        raise ValueError("NaN in input")
    return F.relu(self.a(x))


@style
def _loop_over_children(self: Any, x: Any) -> Any:
    for name, child in self.named_children():
        if name != "drop":
            x = child(x)
    return x


@style
def _loop_over_parameters(self: Any, x: Any) -> Any:
    return F.relu(self.a(x)) + sum(p.pow(2).sum() for p in self.parameters())


@style
def _split_and_stack(self: Any, x: Any) -> Any:
    q, k = F.relu(self.a(x)).chunk(2, -1)
    return torch.cat([q * 2, k], -1).unflatten(-1, (3, 4)).transpose(-1, -2).contiguous()


@style
def _gated_by_chunk(self: Any, x: Any) -> Any:
    gate, value = self.a(x).chunk(2, dim=-1)
    return F.silu(gate) * value


@style
def _residual_norm(self: Any, x: Any) -> Any:
    return self.norm(x + self.b(self.act(self.a(x)))), self.norm(x)


@style
def _residual_reused(self: Any, x: Any) -> Any:
    x = x + self.a(x)
    return self.norm(x), x


@style
def _batch_of_one_input(self: Any, x: Any) -> Any:
    return F.relu(self.a(x[0])), self.norm(x[:1]), self.b(x[..., ::1]), self.b(x.transpose(0, 1))
