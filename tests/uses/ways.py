"""The ways in which programs write to the weights of a model.

A way is a function `way(model, path)` that writes to the tensor at `path` ("0.weight"). A way that
is a generator does the first part, gives the word back for some calls of the model, and goes on.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from .registers import into

Way = Callable[[nn.Module, str], Any]
PARAMETER: dict[str, Way] = {}
ANY: dict[str, Way] = {}
MATRIX: dict[str, Way] = {}

parameter = into(PARAMETER)
"""Registers a way of writing that only parameters know."""
anything = into(ANY)
"""Registers a way of writing for parameters and buffers."""
matrix = into(MATRIX)
"""Registers a way of writing for parameters of two dimensions or more."""


def ways_for(tensor: torch.Tensor) -> dict[str, Way]:
    """Return the ways that fit a tensor."""
    result = dict(ANY)
    if isinstance(tensor, nn.Parameter):
        result |= PARAMETER
        if tensor.dim() > 1:
            result |= MATRIX
    return result


def at(model: nn.Module, path: str) -> tuple[nn.Module, str, Any]:
    """Return the module that owns the tensor at `path`, the tensor's name there, and the tensor."""
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    return module, name, getattr(module, name)


def new(like: torch.Tensor) -> torch.Tensor:
    """Return other values of the same shape, positive so that a variance may have them."""
    generator = torch.Generator().manual_seed(9)
    return torch.rand(like.shape, generator=generator) * 0.8 + 0.2


def _in_place(name: str, write: Callable[[Any], Any]) -> None:
    """Register an in-place expression, under no_grad as it is and through .data and .detach()."""

    def plain(model: nn.Module, path: str) -> None:
        with torch.no_grad():
            write(at(model, path)[2])

    def data(model: nn.Module, path: str) -> None:
        write(at(model, path)[2].data)

    def detached(model: nn.Module, path: str) -> None:
        write(at(model, path)[2].detach())

    ANY[name], ANY[f"data_{name}"], ANY[f"detach_{name}"] = plain, data, detached


def _set_first(t: Any) -> None:
    t[0] = 0.7


def _set_ellipsis(t: Any) -> None:
    t[...] = new(t)


def _set_mask(t: Any) -> None:
    t[t > 0.1] = 0.25


_in_place("copy_", lambda t: t.copy_(new(t)))
_in_place("fill_", lambda t: t.fill_(0.3))
_in_place("mul_", lambda t: t.mul_(2))
_in_place("add_", lambda t: t.add_(new(t), alpha=0.5))
_in_place("set_first", _set_first)
_in_place("set_ellipsis", _set_ellipsis)
_in_place("set_mask", _set_mask)
_in_place("clamp_", lambda t: t.clamp_(0.05, 0.1))
_in_place("lerp_", lambda t: t.lerp_(new(t), 0.5))
_in_place("row_view", lambda t: t[0].fill_(0.6))
_in_place("flat_view", lambda t: t.view(-1)[1:3].fill_(0.6))
_in_place("chunk", lambda t: t.chunk(2)[1].mul_(3))
_in_place("masked_fill_", lambda t: t.masked_fill_(t < 0.2, 0.4))
_in_place("foreach_mul_", lambda t: torch._foreach_mul_([t], 2.0))
_in_place("foreach_copy_", lambda t: torch._foreach_copy_([t], [new(t)]))
_in_place("foreach_lerp_", lambda t: torch._foreach_lerp_([t], [new(t)], 0.3))
_in_place("add_out", lambda t: torch.add(t, new(t), out=t))
_in_place("lerp_out", lambda t: torch.lerp(t, new(t), 0.5, out=t))


@anything
def chained_operators(model: nn.Module, path: str) -> None:
    with torch.no_grad():
        at(model, path)[2].mul_(0.9).add_(0.1).clamp_(min=0.05).zero_().add_(0.2)


@anything
def _augmented(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    tensor.data += new(tensor)
    with torch.no_grad():
        setattr(module, name, tensor.mul_(1))


@anything
def _data_assigned(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    tensor.data = new(tensor)


@anything
def _data_assigned_then_filled(model: nn.Module, path: str) -> Iterator[None]:
    tensor = at(model, path)[2]
    values = new(tensor)
    tensor.data = values
    yield
    values.mul_(0.5)


@anything
def _set_(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    with torch.no_grad():
        tensor.set_(new(tensor))


@anything
def _in_inference_mode(model: nn.Module, path: str) -> None:
    with torch.inference_mode():
        at(model, path)[2].copy_(new(at(model, path)[2]))


@anything
def _in_another_thread(model: nn.Module, path: str) -> None:
    def write() -> None:
        at(model, path)[2].data.mul_(1.5)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def _held(name: str, take: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
    """Register an alias that is taken, kept over calls, and written to late."""

    def way(model: nn.Module, path: str) -> Iterator[None]:
        alias = take(at(model, path)[2])
        yield
        write(alias)
        yield
        write(alias)

    ANY[f"held_{name}"] = way


def _grow_array(a: Any) -> None:
    a += 0.25


_held("detach", lambda t: t.detach(), lambda a: a.add_(0.25))
_held("data", lambda t: t.data, lambda a: a.add_(0.25))
_held("row", lambda t: t.detach()[0], lambda a: a.add_(0.25))
_held("flat", lambda t: t.data.view(-1), lambda a: a.add_(0.25))
_held("view_of_view", lambda t: t.detach().view(-1)[2:].view(-1), lambda a: a.add_(0.25))
_held("numpy", lambda t: t.detach().numpy(), _grow_array)
_held("dlpack", lambda t: torch.from_dlpack(t.detach()), lambda a: a.add_(0.25))
_held(
    "storage",
    lambda t: torch.empty(0).set_(t.detach().untyped_storage(), 0, (t.numel(),)),
    lambda a: a.add_(0.25),
)
_held("unbind", lambda t: t.detach().unbind(0), lambda a: a[-1].add_(0.25))
_held("deep_detach", lambda t: t.detach().data.detach(), lambda a: a.add_(0.25))


@parameter
def _held_view_with_graph(model: nn.Module, path: str) -> Iterator[None]:
    alias = at(model, path)[2].view(-1)
    yield
    with torch.no_grad():
        alias.add_(0.25)


@anything
def _held_state_dict(model: nn.Module, path: str) -> Iterator[None]:
    state = model.state_dict()
    yield
    state[path].mul_(0.5)


@anything
def _state_dict_written(model: nn.Module, path: str) -> None:
    model.state_dict()[path].copy_(new(at(model, path)[2]))


@anything
def _state_dict_keep_vars(model: nn.Module, path: str) -> None:
    with torch.no_grad():
        model.state_dict(keep_vars=True)[path].fill_(0.3)


@anything
def _state_dict_average(model: nn.Module, path: str) -> None:
    other = copy.deepcopy(model.state_dict())
    for value in other.values():
        value.mul_(0.5)
    for mine, theirs in zip(model.state_dict().values(), other.values(), strict=True):
        mine.copy_(0.9 * mine + 0.1 * theirs)


def _changed_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: value.clone() * 0.5 + 0.1 if value.is_floating_point() else value.clone()
        for key, value in model.state_dict().items()
    }


@anything
def _load_state_dict(model: nn.Module, path: str) -> None:
    model.load_state_dict(_changed_state(model))


@anything
def _load_assign(model: nn.Module, path: str) -> None:
    model.load_state_dict(_changed_state(model), assign=True)


@anything
def _load_assign_then_write(model: nn.Module, path: str) -> Iterator[None]:
    state = _changed_state(model)
    model.load_state_dict(state, assign=True)
    yield
    with torch.no_grad():
        state[path].mul_(0.5)


@anything
def _load_partly(model: nn.Module, path: str) -> None:
    model.load_state_dict({path: _changed_state(model)[path]}, strict=False)


@anything
def _load_submodule(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    module.load_state_dict({name: new(tensor)}, strict=False)


@anything
def _load_with_prefix(model: nn.Module, path: str) -> None:
    state = {f"module.{key}": value for key, value in _changed_state(model).items()}
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)


@anything
def _load_twice(model: nn.Module, path: str) -> Iterator[None]:
    first = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(_changed_state(model))
    yield
    model.load_state_dict(first)


@anything
def _apply(model: nn.Module, path: str) -> None:
    owner = at(model, path)[0]

    def initialize(module: nn.Module) -> None:
        if module is owner:
            with torch.no_grad():
                at(model, path)[2].uniform_(0.2, 0.4)

    model.apply(initialize)


@anything
def _functional_call(model: nn.Module, path: str) -> Iterator[None]:
    """Values for one call only; the model's own must be used before and after it."""
    values = {path: new(at(model, path)[2])}
    yield
    handle = model.register_forward_pre_hook(_functional_once(model, values))
    yield
    handle.remove()


def _functional_once(model: nn.Module, values: dict[str, torch.Tensor]) -> Any:
    entered = [False]

    def hook(module: nn.Module, args: Any) -> None:
        if not entered[0]:
            entered[0] = True
            torch.func.functional_call(model, values, args)
            entered[0] = False

    return hook


@anything
def _double_and_back(model: nn.Module, path: str) -> None:
    model.double()
    at(model, path)[2].data.mul_(2)
    model.float()


# Only parameters.


def _stepped(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Register two steps of an optimizer with gradients that are given."""

    def way(model: nn.Module, path: str) -> Iterator[None]:
        optimizer = make([*model.parameters()])
        for _ in range(2):
            for p in model.parameters():
                p.grad = new(p) - 0.5
            optimizer.step()
            optimizer.zero_grad()
            yield

    PARAMETER[name] = way


for _kind, _class in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
    for _how in ("plain", "foreach", "fused"):
        _options: dict[str, Any] = {"foreach": False} if _how == "plain" else {_how: True}
        if _kind == "sgd":
            _options["momentum"] = 0.9
        _stepped(
            f"{_kind}_{_how}",
            lambda p, made=_class, options=_options: made(p, lr=0.05, weight_decay=0.1, **options),
        )
_stepped("rmsprop", lambda p: torch.optim.RMSprop(p, lr=0.05))
_stepped("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.05))
_stepped("adamax", lambda p: torch.optim.Adamax(p, lr=0.05))


@parameter
def _trained(model: nn.Module, path: str) -> Iterator[None]:
    """Real steps: a loss of the parameters themselves, backward, step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        sum(p.pow(2).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@parameter
def _vector_to_parameters(model: nn.Module, path: str) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


@parameter
def _vector_then_written(model: nn.Module, path: str) -> Iterator[None]:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    yield
    vector.mul_(0.5)


@parameter
def _moving_average(model: nn.Module, path: str) -> None:
    other = [new(p) for p in model.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other, strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)


@parameter
def _moving_average_data(model: nn.Module, path: str) -> None:
    for mine in model.parameters():
        mine.data = mine.data * 0.9 + new(mine) * 0.1


@parameter
def _averaged_model(model: nn.Module, path: str) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())


@parameter
def _copied_from_another(model: nn.Module, path: str) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.mul_(0.5)
            mine.data.copy_(theirs.data)


@parameter
def _swap_tensors(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    torch.utils.swap_tensors(tensor, nn.Parameter(new(tensor)))


@parameter
def _new_parameter(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    setattr(module, name, nn.Parameter(new(tensor)))


@parameter
def _new_parameter_then_written(model: nn.Module, path: str) -> Iterator[None]:
    module, name, tensor = at(model, path)
    setattr(module, name, nn.Parameter(new(tensor)))
    yield
    getattr(module, name).data.mul_(0.5)


@parameter
def _register_parameter(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    module.register_parameter(name, nn.Parameter(new(tensor)))


@parameter
def _parameters_dictionary(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    module._parameters[name] = nn.Parameter(new(tensor))


@parameter
def _deleted_and_assigned(model: nn.Module, path: str) -> None:
    """What older code does to put a computed weight in the place of a parameter."""
    module, name, tensor = at(model, path)
    values = new(tensor)
    delattr(module, name)
    setattr(module, name, values)


@parameter
def _parameter_of_the_data(model: nn.Module, path: str) -> Iterator[None]:
    module, name, tensor = at(model, path)
    setattr(module, name, nn.Parameter(tensor.data))
    yield
    tensor.data.mul_(0.5)


@parameter
def _written_and_requires_grad(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    tensor.requires_grad_(False)
    tensor.mul_(2)
    tensor.requires_grad_(True)


@parameter
def _random_in_place(model: nn.Module, path: str) -> None:
    with torch.no_grad():
        at(model, path)[2].normal_().mul_(0.1).bernoulli_(0.5).uniform_(-0.5, 0.5)


def _initialized(name: str, write: Callable[[Any], Any], to: dict[str, Way]) -> None:
    to[f"init_{name}"] = lambda model, path: write(at(model, path)[2])


_initialized("ones_", nn.init.ones_, PARAMETER)
_initialized("zeros_", nn.init.zeros_, PARAMETER)
_initialized("normal_", nn.init.normal_, PARAMETER)
_initialized("trunc_normal_", nn.init.trunc_normal_, PARAMETER)
_initialized("constant_", lambda p: nn.init.constant_(p, 0.1), PARAMETER)
_initialized("kaiming_uniform_", nn.init.kaiming_uniform_, MATRIX)
_initialized("xavier_normal_", nn.init.xavier_normal_, MATRIX)
_initialized("orthogonal_", nn.init.orthogonal_, MATRIX)
_initialized("sparse_", lambda p: nn.init.sparse_(p, 0.5) if p.dim() == 2 else p, MATRIX)


@parameter
def _reset_parameters(model: nn.Module, path: str) -> None:
    owner = at(model, path)[0]
    if hasattr(owner, "reset_parameters"):
        owner.reset_parameters()


@parameter
def _pruned(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    prune.l1_unstructured(module, name, amount=0.5)
    yield
    prune.random_unstructured(module, name, amount=0.2)
    yield
    prune.remove(module, name)


@parameter
def _pruned_from_mask(model: nn.Module, path: str) -> None:
    module, name, tensor = at(model, path)
    prune.custom_from_mask(module, name, mask=(new(tensor) > 0.5).float())


@parameter
def _pruned_globally(model: nn.Module, path: str) -> None:
    module, name, _ = at(model, path)
    prune.global_unstructured([(module, name)], prune.L1Unstructured, amount=0.5)


@matrix
def _pruned_structured(model: nn.Module, path: str) -> None:
    module, name, _ = at(model, path)
    prune.ln_structured(module, name, amount=0.5, n=2, dim=0)


class Doubled(nn.Module):
    """A parametrization that has a right inverse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.4


@parameter
def _parametrized(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    parametrize.register_parametrization(module, name, Doubled())
    yield
    parametrize.remove_parametrizations(module, name)


@parameter
def _parametrized_unsafe(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    parametrize.register_parametrization(module, name, nn.Tanh(), unsafe=True)
    yield
    with torch.no_grad():
        module.parametrizations[name].original.mul_(2)


@matrix
def _parametrized_weight_norm(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    parametrizations.weight_norm(module, name)
    yield
    with torch.no_grad():
        module.parametrizations[name].original0.mul_(2)
    yield
    parametrize.remove_parametrizations(module, name)


@matrix
def _parametrized_spectral_norm(model: nn.Module, path: str) -> None:
    module, name, _ = at(model, path)
    parametrizations.spectral_norm(module, name)


@matrix
def _weight_norm(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    nn.utils.weight_norm(module, name)
    yield
    with torch.no_grad():
        getattr(module, f"{name}_g").mul_(2)
    yield
    nn.utils.remove_weight_norm(module, name)


@matrix
def _spectral_norm(model: nn.Module, path: str) -> Iterator[None]:
    module, name, _ = at(model, path)
    nn.utils.spectral_norm(module, name)
    yield
    nn.utils.remove_spectral_norm(module, name)


@matrix
def _copied_from_numpy(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    tensor.data = torch.from_numpy(new(tensor).numpy() * 0.5)


@matrix
def _data_flipped(model: nn.Module, path: str) -> None:
    tensor = at(model, path)[2]
    tensor.data = tensor.data.flip(0)
