"""What all optimizers share: the step over a group, fused or as torch has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import _garbage
from ..ops.optimizer_step import rules
from . import batch as _step
from . import pending_splits, split_parameter
from . import reference as _reference
from . import release as _release
from .gpu import step_cache as _planned
from .checkpoints import CheckpointedOptimizer
from .compiler import never_compiled
from .groups import OPTIONS, Group, hold_list
from .states import State, check_options

_halves_apart = torch._C.DisableTorchFunctionSubclass
"""Inside, a split parameter is nothing but its upper half."""

_STEPS_TOGETHER = 256
"""Numbers of steps that share an allocation on a device."""


class FusedOptimizer(CheckpointedOptimizer):
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
    _release: _release.Release | None = None
    _measured: list[_step.Measured] | None = None
    # Of a step that is being made: its parts so far, None once one cannot be repeated.
    _parts: list[_planned.Part] | None = None

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
        self._options_given = {}
        self._halves = {}
        self._forget_steps()
        super().__init__(*args, **kwargs)
        self.state = _planned.counted(self.state)
        for group in self._groups():
            for parameter in group["params"]:
                self._conform(parameter, group)
        if release_gradients:
            self._release_gradients()

    def _forget_steps(self) -> None:
        # By what was stepped: the number of a group, and of a single parameter's stream.
        self._records: dict[tuple[int, int | None], _planned.Record] = {}
        self._captured = []
        self._fresh_steps: dict[torch.device, list[Tensor]] = {}

    def _release_gradients(self) -> None:
        self._release = _release.Release(self)
        self._release.watch(self.param_groups)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        """The rule's hyper-parameters in the order of its `_constants` function.

        The learning rate is a tensor where it is one on a device with kernels.
        """
        raise NotImplementedError

    def _rule(self, group: Group) -> str:
        """The rule that updates the group."""
        return self.rule

    def __getstate__(self) -> dict[str, Any]:
        parameters = [own for group in self.param_groups for own in group["params"]]
        own = {
            "_options": self._options,
            "_options_given": self._options_given,
            "_low_halves": {p: self.low_half(p) for p in parameters if p in self._halves},
            "_split_in_model": [p for p in parameters if type(p) is split_parameter.SplitParameter],
            "_releases": self._release is not None,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        low_halves, in_model = (state.pop(k, ()) for k in ("_low_halves", "_split_in_model"))
        super().__setstate__(state)
        self.state = _planned.counted(self.state)
        if "_records" not in self.__dict__:
            self._forget_steps()
            self._halves = {}
        # Copies of split parameters are plain float32, until a copy of the optimizer steps them.
        for parameter in in_model:
            if type(parameter) is not split_parameter.SplitParameter:
                split_parameter.split(parameter)
        for parameter, low in dict(low_halves).items():
            self.set_low_half(parameter, low)
        if state.get("_releases"):
            self._release_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group may have its own master_weights, state_dtype and seed.

        A group with such options is a copy of the dictionary, any other the dictionary itself.
        """
        if isinstance(param_group, dict):
            hold_list(param_group)
            group = Group(param_group, self._options)
            check_options(type(self).__name__, group)
            if not param_group.keys().isdisjoint(OPTIONS):
                param_group = group
        super().add_param_group(param_group)
        for parameter in param_group["params"]:
            self._options_given.pop(parameter, None)
            if isinstance(param_group, Group):
                self._options_given[parameter] = param_group.options
        group = self._groups()[-1]
        pending_splits.hold(group["params"], self)
        _planned.load(group["params"])
        if self._release is not None:
            self._release.watch(self.param_groups)
        if self.state:
            for parameter in group["params"]:
                self._conform(parameter, group)

    @never_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step; returns what `closure`, which computes the loss again, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is not None and getattr(self, "found_inf", None) is not None:
            self._release.refuse("GradScaler")
        stream = 0
        with _halves_apart():
            with self._applied_clipping(), self._norms_together():
                for number, group in enumerate(self._groups()):
                    self._update_group(group, stream, (number, None))
                    stream += len(group["params"])
            if self._release is not None:
                self._release.end_step(self.param_groups)
        return loss

    def _update_group(self, group: Group, stream: int, key: tuple[int, int | None]) -> None:
        record = self._records.get(key)
        if record is not None and record.repeat(self, group, stream):
            return
        self._records.pop(key, None)
        before = _planned.change_count(self.state)
        others = self._others(group)
        if others:
            self._step_as_torch(Group({**group, "params": others}, group.options))
            if len(others) == len(group["params"]):
                return
        self._parts = [] if before is not None and not others else None
        try:
            with torch.no_grad(), self._making_plans(group):
                self._place_steps(group)
                self._step_group(group, stream, {*map(id, others)})
            now = _planned.change_count(self.state)
            if before is not None and now is not None:
                for other in self._records.values():
                    other.settle(before, now)
            if self._parts and now is not None:
                self._records[key] = _planned.Record(self, group, stream, self._parts)
        finally:
            self._parts = None

    def _making_plans(self, group: Group) -> AbstractContextManager[None]:
        """States and plans are made once and stay: nothing to collect among them."""
        return _garbage.paused() if _planned.may_plan(group["params"]) else nullcontext()

    def _update_one(self, parameter: Tensor, group_number: int, stream: int) -> None:
        """The step of a single parameter, inside backward."""
        group = self._groups()[group_number]
        alone = Group({**group, "params": [parameter]}, group.options)
        with _halves_apart():
            self._update_group(alone, stream, (group_number, stream))

    def _settings(self, group: Group) -> Hashable:
        """What decides, beside hyper-parameters, how the group's step is done."""
        options = (group["master_weights"], group["state_dtype"], group["seed"])
        is_differentiable = bool(group.get("differentiable"))
        return (
            *(self._rule(group), self._names(group), group["maximize"], is_differentiable),
            *options,
        )

    def _await_sums(self, measured: _step.Measured) -> None:
        """Ends a step whose sums are still to be added over processes, now or with others."""
        if self._measured is None:
            _step.finish([measured])
        else:
            self._measured.append(measured)

    @contextmanager
    def _norms_together(self) -> Iterator[None]:
        """Updates that need norms of sharded parameters end together, after one message."""
        self._measured = []
        try:
            yield
            if self._measured:
                _step.finish(self._measured)
        finally:
            self._measured = None

    def _others(self, group: Group) -> list[Tensor]:
        """The parameters with gradients that torch's class steps, as it would without us."""
        having = [own for own in group["params"] if own.grad is not None]
        if group.get("differentiable"):
            return having
        has_choice = self._stock() is not None and not self._has_formats(group)
        return [
            own
            for own in having
            if own.grad.layout is not torch.strided
            or own.is_complex()
            or (has_choice and not _planned.has_kernel(own))
        ]

    def _has_formats(self, group: Group) -> bool:
        return group["master_weights"] is not None or group["state_dtype"] is not None

    def _stock(self) -> type[Optimizer] | None:
        """The class of torch.optim that this one extends, or None."""
        return next((c for c in type(self).__mro__ if _is_stock(c)), None)

    def _scaling(self, group: Group) -> _step.Scaling:
        return _step.Scaling(
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            -1.0 if group["maximize"] else 1.0,
            self._clip_factor,
        )

    def _step_group(self, group: Group, stream: int, others: Set[int]) -> None:
        """The step of all parameters that have gradients, but for those whose ids are `others`."""
        names = self._names(group)
        batch = _step.Batch.of(names)
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and id(parameter) not in others:
                state = self.state[parameter]
                self._begin(parameter, group, state, names)
                low = self._current_low(parameter, group)
                batch.add(parameter, state, names, stream + position, low)
        self._run(batch, group)

    def _begin(self, parameter: Tensor, group: Group, state: State, names: Sequence[str]) -> None:
        """Makes the states that the parameter lacks."""
        if "step" not in state:
            state["step"] = self._first_step(parameter)
        for name in names:
            if name not in state:
                self._store(parameter, group, name, self._initial(name, parameter, group))
        if names and state[names[0]].stride() != parameter.stride():
            # The parameter was given memory of another layout.
            self._conform(parameter, group)

    def _first_step(self, parameter: Tensor) -> Tensor:
        """The number of steps that were done, none; where kernels count, beside others."""
        if not _planned.is_planned(parameter):
            return torch.zeros((), dtype=_step.step_dtype())
        fresh = self._fresh_steps.setdefault(parameter.device, [])
        if not fresh:
            fresh.extend(torch.zeros(_STEPS_TOGETHER, device=parameter.device).unbind())
        return fresh.pop()

    def _is_left_out(self) -> bool:
        """Whether a GradScaler found gradients that are not finite; waits for a GPU."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf.item())

    def _place_steps(self, group: Group) -> None:
        """Brings numbers of steps, which torch may have left on the host, to where they count."""
        if not _planned.may_plan(group["params"]):
            return
        strays: dict[torch.device, list[State]] = {}
        for parameter in group["params"]:
            step = self.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor) and parameter.grad is not None:
                is_there = step.device == parameter.device and step.dtype == torch.float32
                if not is_there and _planned.is_planned(parameter):
                    strays.setdefault(parameter.device, []).append(self.state[parameter])
        for device, states in strays.items():
            values = torch.stack([state["step"].reshape(()).float().cpu() for state in states])
            for state, step in zip(
                states, values.to(device, non_blocking=True).unbind(), strict=True
            ):
                state["step"] = step

    def _run(self, batch: _step.Batch, group: Group) -> None:
        self._run_rule(self._rule(group), batch, group, self._hyper(group))

    def _run_rule(
        self,
        rule: str,
        batch: _step.Batch,
        group: Group,
        hyper: tuple[Any, ...],
        flags: tuple[bool, ...] = (),
        repeats: bool = True,
    ) -> None:
        """One step by a rule.

        flags: hyper-parameters beyond those of the group. repeats: the next step can be the same.
        """
        for part in batch.by_device() if batch.parameters else []:
            planned = _planned.plan(self, rule, part, group, hyper, flags)
            if planned is not None:
                _planned.launch(self, planned, (*hyper, *flags), self._scaling(group))
                part.bump_versions()
            else:
                self._run_part(rule, part, group, (*map(number, hyper), *flags))
            if planned is None or not repeats or part.has_copies:
                self._parts = None
            elif self._parts is not None:
                self._parts.append(planned)

    def _run_part(
        self, rule: str, batch: _step.Batch, group: Group, hyper: tuple[float, ...]
    ) -> None:
        """One step by a rule of tensors on one device that makes no plans."""
        fused = _step.is_compiled(rule) and all(map(_step.is_fused, batch.parameters))
        stochastic = group["state_dtype"] == torch.bfloat16
        run = functools.partial(
            _step.run if fused else _reference.run,
            *(rule, batch, hyper, self._scaling(group), stochastic, group["seed"]),
        )
        if not batch.wholes or not hasattr(rules, f"{rule}_measure"):
            run()
        else:
            wholes, sums = _step.whole_parameters(batch), _step.empty_sums(batch)
            self._await_sums(_step.Measured(run, wholes, sums))

    def _step_as_torch(self, group: Group) -> None:
        """One step of the group by the class of torch.optim that this one extends."""
        name = type(self).__name__
        if any(type(own) is split_parameter.SplitParameter for own in group["params"]):
            raise RuntimeError(
                f"{name}: expected dense gradients of split weights and no differentiable steps, "
                "which go torch's way; give optimize a dtype that keeps the module in float32, "
                "as in dtype={'': torch.bfloat16, 'path.to.module': torch.float32}"
            )
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
        if self._is_left_out():
            return
        for parameter in group["params"]:
            if parameter.grad is not None and scale is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))
            if parameter.grad is not None and self._clip_factor is not None:
                parameter.grad.mul_(self._clip_factor.to(parameter.grad.device))
        step = vars(stock)["step"]
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        groups, hidden = self.param_groups, {"found_inf": found_inf, "grad_scale": scale}
        self.__dict__.update(param_groups=[group], found_inf=None, grad_scale=None)
        try:
            step(self)
        finally:
            self.__dict__.update(param_groups=groups, **hidden)


def number(value: float | Tensor) -> float:
    """A hyper-parameter as a number of the host."""
    return float(value)


def rate(group: Group) -> float | Tensor:
    """The group's learning rate: a tensor on a device with kernels stays there."""
    value: float | Tensor = group["lr"]
    if isinstance(value, Tensor) and _planned.is_planned(value):
        return value
    return float(value)


def check_at_least_zero(name: str, argument: str, value: float | Tensor) -> None:
    """Refuses negative hyper-parameters and NaN, and tensors of several elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name}: expected {argument} with one element, got {list(value.shape)}")
    if not value >= 0.0:
        raise ValueError(f"{name}: expected {argument} >= 0, got {value}")


def _is_stock(candidate: type) -> bool:
    """Whether it is an optimizer of torch.optim with a step of its own."""
    return (
        candidate is not Optimizer
        and candidate.__module__.startswith("torch.optim.")
        and "step" in vars(candidate)
    )
