"""What all optimizers share: formats, the step over a group, checkpoints, the memory report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import _reference, _release, _sharding, _step, formats, rules
from ._clip import ClippingOptimizer
from ._groups import OPTIONS, Group
from ._step import LOW_HALF, SCALES

State = dict[str, Any]

LEAST_CODED = 4096
"""Elements below which a state stays float32 where 8-bit codes are asked for: it weighs little."""

IN_MODEL = "split in model"
"""A value of master_weights that `oxytorch.optimize` sets: lower halves belong to the model, whose
state dictionary shows whole weights, so that checkpoints of the optimizer leave them out."""

UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "variance"})
"""States that are never negative."""


@dataclass(frozen=True)
class _Kept:
    """Carries a tensor through torch's load_state_dict, which would cast it."""

    tensor: Tensor


class FusedOptimizer(ClippingOptimizer):
    """Mixed in before a class of torch.optim: same state, groups and checkpoints, fused steps.

    Args:
        master_weights: "split" keeps the lower 16 bits of the float32 weight beside each bfloat16
            parameter, which holds the upper 16: the pair is updated exactly as float32 would be.
            None updates parameters in their own dtype.
        state_dtype: float32; bfloat16, rounded at random; or int8, codes of 8 bits with a scale for
            every 256. None means float32 for float32 and split parameters, else the parameter's own
            dtype, as in torch.
        seed: of the random rounding, which depends on nothing but it, the step, the parameter's
            place and the element.

        release_gradients: steps run inside backward, a parameter at a time, and free its gradient,
            so that gradients of the whole model never exist together. `step()` still has to be
            called after each backward pass; see docs/gradients.md for what cannot work with it.

    The first three may be given per parameter group. Other arguments are those of torch's class.
    What the fused step does not do (sparse gradients, complex parameters, differentiable steps)
    goes torch's own way.

    Sharded parameters (DTensor, as `torch.distributed.fsdp.fully_shard` makes them) have sharded
    states; each process updates its shards. Norms of a tensor (Lamb, Lars) are those of the whole
    one, for which the processes exchange one message in each step. Random rounding has a stream per
    shard, and blocks of 8-bit codes begin anew in each, so that small states differ, within their
    rounding, from those of another number of processes.
    """

    rule: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]]
    _step_supports_amp_scaling = True
    _release: _release.Release | None = None
    _measured: list[_step.Measured] | None = None
    param_groups: list[Group]  # type: ignore[assignment]

    def __init__(
        self,
        *args: Any,
        master_weights: Literal["split"] | None = None,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
        release_gradients: bool = False,
        **kwargs: Any,
    ) -> None:
        self._options = dict(zip(OPTIONS, (master_weights, state_dtype, seed), strict=True))
        # Lower halves of parameters that have no state yet: a state that is not whole would tell
        # torch.distributed.checkpoint that there is nothing left to make.
        self._given_halves: dict[Tensor, Tensor] = {}
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._conform(parameter, group)
        if release_gradients:
            self._release_gradients()

    def _release_gradients(self) -> None:
        self._release = _release.Release(self)
        self._release.watch(self.param_groups)

    def _hyper(self, group: Group) -> tuple[float, ...]:
        """The rule's hyper-parameters in the order of its `_constants` function."""
        raise NotImplementedError

    def _rule(self, group: Group) -> str:
        """The rule that updates the group."""
        return self.rule

    def _names(self, group: Group) -> tuple[str, ...]:
        """The states that the group's options use, in the order of the rule's operands."""
        return self.state_names

    def _initial(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        """The first value of a state, in the dtype that torch would give it."""
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "_options": self._options,
            "_given_halves": self._given_halves,
            "_releases": self._release is not None,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("_releases"):
            self._release_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group may have its own master_weights, state_dtype and seed."""
        if isinstance(param_group, dict):
            param_group = Group(param_group, self._options)
            _check_options(type(self).__name__, param_group)
        super().add_param_group(param_group)
        if self._release is not None:
            self._release.watch(self.param_groups)
        if self.state:
            for parameter in param_group["params"]:
                self._conform(parameter, param_group)

    # Formats

    def _is_split(self, parameter: Tensor, group: Group) -> bool:
        is_split = group["master_weights"] in ("split", IN_MODEL)
        return is_split and parameter.dtype == torch.bfloat16

    def _state_dtype(self, parameter: Tensor, group: Group, name: str) -> torch.dtype:
        wanted: torch.dtype | None = group["state_dtype"]
        if wanted is None:
            return torch.float32 if self._is_split(parameter, group) else parameter.dtype
        if wanted == torch.int8 and parameter.numel() < LEAST_CODED:
            return torch.float32
        return wanted

    def _conform(self, parameter: Tensor, group: Group) -> None:
        """Brings the parameter's states, if there are any, into the group's formats."""
        state = self.state.get(parameter)
        if not state or not parameter.is_floating_point():
            return
        for name in self.state_names:
            if isinstance(state.get(name), Tensor) and name + SCALES not in state:
                self._store(parameter, group, name, state[name])
        if self._is_split(parameter, group) and LOW_HALF not in state:
            state[LOW_HALF] = self._first_half(parameter)

    def _first_half(self, parameter: Tensor) -> Tensor:
        """The lower half with which a split parameter begins."""
        given = self._given_halves.pop(parameter, None)
        return torch.zeros_like(parameter, dtype=torch.int16) if given is None else given

    def low_half(self, parameter: Tensor) -> Tensor | None:
        """The lower half of a split parameter, or None where it has none or only zeros."""
        low: Tensor | None = self.state.get(parameter, {}).get(LOW_HALF)
        return self._given_halves.get(parameter) if low is None else low

    def set_low_half(self, parameter: Tensor, low: Tensor) -> None:
        """Makes `low` (int16, placed as the parameter) the lower half that steps update."""
        if self.state.get(parameter):
            self.state[parameter][LOW_HALF] = low
        else:
            self._given_halves[parameter] = low

    def _store(self, parameter: Tensor, group: Group, name: str, value: Tensor) -> None:
        """Keeps `value` as the parameter's state `name`, in the group's format."""
        state = self.state[parameter]
        state.pop(name + SCALES, None)
        dtype = self._state_dtype(parameter, group, name)
        value = _aligned(parameter, value, name)
        if dtype == torch.int8:
            codes, state[name + SCALES] = formats.encode(
                _sharding.local(value), name not in UNSIGNED
            )
            state[name] = _sharding.placed_like(value, codes)
        else:
            state[name] = value.to(dtype)

    def _value(self, state: State, name: str) -> Tensor:
        """A state as torch keeps it."""
        kept: Tensor = state[name]
        scales = state.get(name + SCALES)
        if scales is None:
            return kept
        return _sharding.placed_like(kept, formats.decode(_sharding.local(kept), scales))

    def _group_of(self, parameter: Tensor) -> Group:
        for group in self.param_groups:
            if any(own is parameter for own in group["params"]):
                return group
        raise ValueError(
            f"{type(self).__name__}: expected one of the optimizer's own parameters, "
            f"got another tensor of shape {list(parameter.shape)}"
        )

    def master_weight(self, parameter: Tensor) -> Tensor:
        """The exact float32 weight: of a split parameter both halves together, else a copy."""
        self._group_of(parameter)
        low = self.low_half(parameter)
        if low is None:
            return parameter.detach().float()
        weight = formats.join(_sharding.local(parameter), _sharding.local(low))
        return _sharding.placed_like(parameter, weight)

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, weight: Tensor) -> None:
        """Gives `parameter` the float32 value `weight`; a split parameter gets all its bits.

        weight: of a sharded parameter, sharded too or the whole tensor, the same in all processes.
        """
        group = self._group_of(parameter)
        if weight.shape != parameter.shape:
            raise ValueError(
                f"set_master_weight: expected weight of shape {list(parameter.shape)}, "
                f"got {list(weight.shape)}"
            )
        weight = _sharding.shard_like(parameter, weight, "weight")
        if not self._is_split(parameter, group):
            parameter.copy_(weight)
            return
        upper, low = formats.split(_sharding.local(_aligned(parameter, weight.float(), "weight")))
        _sharding.local(parameter).copy_(upper)
        self.set_low_half(parameter, _sharding.placed_like(parameter, low))

    # Step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step; returns what `closure`, which computes the loss again, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is not None and getattr(self, "found_inf", None) is not None:
            self._release.refuse("GradScaler")
        stream = 0
        with self._applied_clipping(), self._norms_together():
            for group in self.param_groups:
                self._update_group(group, stream)
                stream += len(group["params"])
        if self._release is not None:
            self._release.end_step(self.param_groups)
        return loss

    def _update_group(self, group: Group, stream: int) -> None:
        if self._goes_as_torch(group):
            self._step_as_torch(group)
        else:
            with torch.no_grad():
                self._step_group(group, stream)

    def _update_one(self, parameter: Tensor, group_number: int, stream: int) -> None:
        """The step of a single parameter, inside backward."""
        group = self.param_groups[group_number]
        self._update_group(Group({**group, "params": [parameter]}, group.options), stream)

    @contextmanager
    def _norms_together(self) -> Iterator[None]:
        """Updates that need norms of sharded parameters end together, after one message."""
        self._measured = []
        try:
            yield
            _step.finish(self._measured)
        finally:
            self._measured = None

    def _goes_as_torch(self, group: Group) -> bool:
        """Whether the group has what neither the fused step nor the reference does."""
        is_other = group.get("differentiable") or any(
            parameter.grad is not None
            and (parameter.grad.layout is not torch.strided or parameter.is_complex())
            for parameter in group["params"]
        )
        if is_other or self._has_formats(group) or self._stock() is None:
            return bool(is_other)
        return not all(
            parameter.grad is None or _step.is_fused(parameter) for parameter in group["params"]
        )

    def _has_formats(self, group: Group) -> bool:
        return group["master_weights"] is not None or group["state_dtype"] is not None

    def _stock(self) -> type[Optimizer] | None:
        """The class of torch.optim that this one extends, or None."""
        return next((c for c in type(self).__mro__ if _is_stock(c)), None)

    def _scaling(self, group: Group) -> _step.Scaling:
        return _step.Scaling(
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            -self._clip_factor if group["maximize"] else self._clip_factor,
        )

    def _step_group(self, group: Group, stream: int) -> None:
        names = self._names(group)
        batch = _step.Batch.of(names)
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                state = self.state[parameter]
                self._begin(parameter, group, state, names)
                batch.add(parameter, state, names, stream + position)
        self._run(batch, group)

    def _begin(self, parameter: Tensor, group: Group, state: State, names: Sequence[str]) -> None:
        """Makes the states that the parameter lacks."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=_step.step_dtype())
        for name in names:
            if name not in state:
                self._store(parameter, group, name, self._initial(name, parameter, group))
        self._begin_split(parameter, group, state)

    def _begin_split(self, parameter: Tensor, group: Group, state: State) -> None:
        """A bfloat16 parameter counts as exact until its lower half is known."""
        if not self._is_split(parameter, group):
            state.pop(LOW_HALF, None)
        elif LOW_HALF not in state:
            state[LOW_HALF] = self._first_half(parameter)

    def _run(self, batch: _step.Batch, group: Group) -> None:
        self._run_rule(self._rule(group), batch, group, self._hyper(group))

    def _run_rule(
        self, rule: str, batch: _step.Batch, group: Group, hyper: tuple[float, ...]
    ) -> None:
        fused = _step.is_compiled(rule) and all(map(_step.is_fused, batch.parameters))
        stochastic = group["state_dtype"] == torch.bfloat16
        run = functools.partial(
            _step.run if fused else _reference.run,
            *(rule, batch, hyper, self._scaling(group), stochastic, group["seed"]),
        )
        if not batch.wholes or not hasattr(rules, f"{rule}_measure"):
            run()
        elif self._measured is None:
            _step.finish([_step.Measured(run, batch)])
        else:
            self._measured.append(_step.Measured(run, batch))

    def _step_as_torch(self, group: Group) -> None:
        """One step of the group by the class of torch.optim that this one extends."""
        name = type(self).__name__
        stock = self._stock()
        if stock is None:
            raise RuntimeError(
                f"{name}: expected dense real parameters and gradients; "
                "torch has no optimizer of this kind that takes others"
            )
        if self._has_formats(group):
            raise RuntimeError(
                f"{name}: sparse gradients, complex parameters and differentiable steps go "
                "torch's way, which knows neither master_weights nor state_dtype; "
                "put these parameters into a group that sets both to None"
            )
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        for parameter in group["params"]:
            if parameter.grad is not None and scale is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))
            if parameter.grad is not None and self._clip_factor != 1.0:
                parameter.grad.mul_(self._clip_factor)
        step = vars(stock)["step"]
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        groups, hidden = self.param_groups, {"found_inf": found_inf, "grad_scale": scale}
        self.__dict__.update(param_groups=[group], found_inf=None, grad_scale=None)
        try:
            step(self)
        finally:
            self.__dict__.update(param_groups=groups, **hidden)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch's class has it: states decoded, under the same keys.

        A split parameter's lower half is added as `low_half`, without which its float32 weight
        would be lost (of a sharded parameter as int32).
        """

        def decode(optimizer: Optimizer, packed: dict[str, Any]) -> None:
            states = packed["state"]
            for group, own in zip(packed["param_groups"], self.param_groups, strict=True):
                has_format = any(own[name] for name in OPTIONS)
                for index, parameter in zip(group["params"], own["params"], strict=True):
                    state = states.pop(index, {})
                    if parameter in self._given_halves:
                        state = {**state, LOW_HALF: self._given_halves[parameter]}
                    if own["master_weights"] == IN_MODEL:
                        state = {key: value for key, value in state.items() if key != LOW_HALF}
                    if state:
                        states[index] = self._plain_state(state, has_format)

        handle = self.register_state_dict_post_hook(decode, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _plain_state(self, state: State, has_format: bool) -> State:
        plain = {key: value for key, value in state.items() if not key.endswith(SCALES)}
        for name in self.state_names:
            if isinstance(plain.get(name), Tensor):
                value = self._value(state, name)
                plain[name] = value.float() if has_format else value
        low = plain.get(LOW_HALF)
        if low is not None and _sharding.is_sharded(low):
            # The collectives that gather a checkpoint know no int16.
            plain[LOW_HALF] = low.to(torch.int32)
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of torch's, into the formats that are in use here.

        A split parameter's lower half comes from `low_half` where the checkpoint has it; otherwise
        the parameter counts as exact. Load the model before the optimizer.
        """
        options = [{name: group[name] for name in OPTIONS} for group in self.param_groups]

        def keep(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            """Hides states from torch, which would round them to the parameter's dtype."""
            return {**loaded, "state": {k: _hide(v) for k, v in loaded["state"].items()}}

        def conform(optimizer: Optimizer) -> None:
            self._given_halves = {}
            loaded = zip(self.param_groups, options, strict=True)
            self.param_groups = [Group(group, own) for group, own in loaded]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter in self.state:
                        self._adopt(parameter, group)
                    if parameter in in_model:
                        self.set_low_half(parameter, in_model[parameter])

        in_model = {
            parameter: low
            for group in self.param_groups
            if group["master_weights"] == IN_MODEL
            for parameter in group["params"]
            if (low := self.low_half(parameter)) is not None
        }
        before = self.__getstate__()
        handles = [
            self.register_load_state_dict_pre_hook(keep),
            self.register_load_state_dict_post_hook(conform, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            for handle in handles:
                handle.remove()

    def _adopt(self, parameter: Tensor, group: Group) -> None:
        """Takes over the parameter's hidden states from a checkpoint."""
        state = self.state[parameter]
        for key, value in state.items():
            if isinstance(value, _Kept):
                wanted = _state_shape(parameter, key, value.tensor)
                if value.tensor.shape != wanted:
                    raise ValueError(
                        f"{type(self).__name__}: expected {key} of shape {list(wanted)} "
                        f"in the checkpoint, got {list(value.tensor.shape)}"
                    )
        low = state.pop(LOW_HALF, None)
        if isinstance(state.get("step"), Tensor):
            # torch leaves it shared with the checkpoint, and so with who made that.
            state["step"] = state["step"].clone()
        for key, value in list(state.items()):
            if not isinstance(value, _Kept):
                continue
            tensor = value.tensor.to(parameter.device, copy=True)
            if key in self.state_names:
                self._store(parameter, group, key, tensor)
            else:
                state[key] = tensor
        if self._is_split(parameter, group):
            state[LOW_HALF] = torch.zeros_like(parameter, dtype=torch.int16)
            # Another class than ours would have rounded it to the parameter's dtype.
            if isinstance(low, _Kept) and low.tensor.dtype in (torch.int16, torch.int32):
                state[LOW_HALF].copy_(_sharding.shard_like(parameter, low.tensor, LOW_HALF))

    # Report

    def memory_report(self) -> dict[str, float]:
        """Bytes per element of the parameters, by kind: parameters, low halves, each state.

        Of sharded parameters, this process's shards.
        """
        total: dict[str, int] = {}
        elements = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                shard = _sharding.local(parameter)
                elements += shard.numel()
                total["parameters"] = total.get("parameters", 0) + shard.nbytes
                for key, value in self.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and key != "step":
                        total[key] = total.get(key, 0) + _sharding.local(value).nbytes
        report = {kind: count / max(elements, 1) for kind, count in total.items()}
        return {**report, "total": sum(report.values())}


def check_at_least_zero(name: str, argument: str, value: float | Tensor) -> None:
    """Refuses negative hyper-parameters and NaN, and tensors of several elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name}: expected {argument} with one element, got {list(value.shape)}")
    if not value >= 0.0:
        raise ValueError(f"{name}: expected {argument} >= 0, got {value}")


def _aligned(parameter: Tensor, value: Tensor, name: str) -> Tensor:
    """`value` with the parameter's strides, sharded as the parameter is."""
    value = _sharding.shard_like(parameter, value, name)
    aligned = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    is_aligned = _sharding.local(aligned).stride() == _sharding.local(value).stride()
    return value if is_aligned else aligned.copy_(value)


def _check_options(name: str, group: Group) -> None:
    """Refuses formats that do not exist."""
    if group["master_weights"] not in (None, "split", IN_MODEL):
        raise ValueError(
            f'{name}: expected master_weights None or "split", got {group["master_weights"]!r}'
        )
    if group["state_dtype"] not in (None, torch.float32, torch.bfloat16, torch.int8):
        raise ValueError(
            f"{name}: expected state_dtype None, torch.float32, torch.bfloat16 or torch.int8, "
            f"got {group['state_dtype']}"
        )
    if not isinstance(group["seed"], int):
        raise ValueError(f"{name}: expected a whole number as seed, got {group['seed']!r}")
    parameters = group["params"]
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        tensor = parameter[1] if isinstance(parameter, tuple) else parameter
        if (
            group["master_weights"] == "split"
            and isinstance(tensor, Tensor)
            and tensor.dtype == torch.float16
        ):
            raise ValueError(
                f"{name}: master_weights='split' needs bfloat16 parameters, whose bits are the "
                "first half of a float32; got a float16 parameter"
            )


def _is_stock(candidate: type) -> bool:
    """Whether it is an optimizer of torch.optim with a step of its own."""
    return (
        candidate is not Optimizer
        and candidate.__module__.startswith("torch.optim.")
        and "step" in vars(candidate)
    )


def _hide(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        key: _Kept(value) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
        # A flat checkpoint of torch.distributed has an empty entry for each key that we have.
        if not str(key).endswith(SCALES)
    }


def _state_shape(parameter: Tensor, key: str, value: Tensor) -> torch.Size:
    """The shape that a state has to have; factors of Adafactor are smaller than the parameter."""
    shape = list(parameter.shape)
    if key == "row_var":
        shape[-1:] = [1]
    elif key == "col_var":
        shape[-2:-1] = [1]
    return torch.Size(shape)
