"""What all optimizers share: the step over a group, fused or as torch has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import _reference, _release, _step, rules
from ._checkpoint import CheckpointedOptimizer
from ._groups import OPTIONS, Group
from ._states import State, check_options
from ._step import LOW_HALF


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
    _step_supports_amp_scaling = True
    _release: _release.Release | None = None
    _measured: list[_step.Measured] | None = None

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
        self._given_halves = {}
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
            check_options(type(self).__name__, param_group)
        super().add_param_group(param_group)
        if self._release is not None:
            self._release.watch(self.param_groups)
        if self.state:
            for parameter in param_group["params"]:
                self._conform(parameter, param_group)

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
