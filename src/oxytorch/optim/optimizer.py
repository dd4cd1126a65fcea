"""What all optimizers share: the step over a group, fused or as torch has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import _garbage
from . import checkpoints, pending_splits, split_parameter, states, stock
from .batch import Batch, Scaling
from .clipping import Clipper, is_scaled_by
from .compiler import never_compiled, without_compiler
from .executor import Executor, Update
from .gpu import devices, step_cache
from .gpu.step_cache import StepCache
from .groups import OPTIONS, Group, hold_list
from .release import Release
from .split_parameter import SplitParameter
from .state_table import change_count, counted
from .states import State, StateStore, check_options

_as_upper_halves = torch._C.DisableTorchFunctionSubclass
"""Inside, a split parameter is nothing but its upper half."""


class FusedOptimizer(Optimizer):
    """Mixed in before a class of torch.optim: same state, groups and checkpoints, fused steps.

    Args:
        master_weights: "split" keeps 16 bits beside each bfloat16 parameter, which is the float32
            weight rounded to nearest: the pair is updated exactly as float32 would be.
            None updates parameters in their own dtype.
        state_dtype: float32; bfloat16, rounded stochastically; or int8, 8-bit values with a scale
            for every 256. None means float32 for float32 and split parameters, else the
            parameter's own dtype, as in torch.
        seed: of the stochastic rounding, which depends only on the seed, the step, the parameter's
            index and the element.
        release_gradients: steps run inside backward, a parameter at a time, and free its gradient,
            so that gradients of the whole model never exist together. `step()` still has to be
            called after each backward pass; see docs/gradients.md for what cannot work with it.

    The first three may be given per parameter group. Other arguments are those of torch's class.
    What the fused step does not support (sparse gradients, complex parameters, differentiable
    steps) runs torch's own step.

    Sharded parameters (DTensor, as `torch.distributed.fsdp.fully_shard` makes them) have sharded
    states; each process updates its shards. Norms of a tensor (Lamb, Lars) are those of the whole
    one, for which the processes exchange one message in each step. Random rounding has a stream per
    shard, and blocks of 8-bit codes start over in each, so that small states differ, within their
    rounding, from those of another number of processes.

    It is put together from a store of states and master weights (`StateStore`), a `Clipper` and an
    `Executor`, which runs updates on the CPU, on a GPU or in plain PyTorch. A subclass says by
    which rule, and with what hyper-parameters and states.
    """

    rule: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]]
    _release: Release | None = None

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
        # Of groups that were given options, by parameter: who copies a group as a plain dictionary
        # keeps its parameters and loses the options.
        self._options_given: dict[Tensor, dict[str, Any]] = {}
        self._make_parts()
        with torch.device("cpu"):  # else torch's Adagrad has its steps on the default device
            super().__init__(*args, **kwargs)
        self.state = counted(self.state)
        for group in self._groups():
            for parameter in group["params"]:
                self._conform(parameter, group)
        if release_gradients:
            self._release_gradients()

    def _make_parts(self) -> None:
        self._store = StateStore(self.state_names, self.rule)
        self._clipper = Clipper()
        self._executor = Executor()
        # By what was stepped: the number of a group, and of a single parameter's random stream.
        self._step_caches: dict[tuple[int, int | None], StepCache] = {}

    def _release_gradients(self) -> None:
        self._release = Release(self, weakref.WeakMethod(self._update_one))
        self._release.watch(self.param_groups)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        """The rule's hyper-parameters in the order of its `_constants` function.

        The learning rate is a tensor where it is one on a device with kernels.
        """
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

    def _state_dtype(self, parameter: Tensor, group: Group, name: str) -> torch.dtype:
        """The dtype of a state; int8 stands for codes."""
        return states.state_dtype(parameter, group)

    def _groups(self) -> list[Group]:
        """`param_groups` with their options; what is a plain dictionary there stands as a copy."""
        return [
            group if type(group) is Group else Group(group, self._options_of(group["params"]))
            for group in self.param_groups
        ]

    def _options_of(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The options of a group that says nothing of them."""
        if not self._options_given or not parameters:
            return self._options
        return self._options_given.get(parameters[0], self._options)

    def _group_of(self, parameter: Tensor) -> Group:
        for group in self._groups():
            if any(own is parameter for own in group["params"]):
                return group
        raise ValueError(
            f"{type(self).__name__}: expected one of the optimizer's own parameters, "
            f"got another tensor of shape {list(parameter.shape)}"
        )

    def _parameters(self) -> list[Tensor]:
        return [own for group in self.param_groups for own in group["params"]]

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
        without_compiler(super().add_param_group)(param_group)
        for parameter in param_group["params"]:
            self._options_given.pop(parameter, None)
            if isinstance(param_group, Group):
                self._options_given[parameter] = param_group.options
        group = self._groups()[-1]
        pending_splits.hold(group["params"], self)
        step_cache.load(group["params"])
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
        has_scale = getattr(self, "grad_scale", None) is not None
        rng_stream = 0
        with _as_upper_halves():
            with (
                self._clipper.applied(type(self).__name__, has_scale),
                self._executor.norms_together(),
            ):
                for number, group in enumerate(self._groups()):
                    self._step_group(group, rng_stream, (number, None))
                    rng_stream += len(group["params"])
            if self._release is not None:
                self._release.end_step(self.param_groups)
        return loss

    def _update_one(self, parameter: Tensor, group_number: int, rng_stream: int) -> None:
        """The step of a single parameter, inside backward."""
        group = self._groups()[group_number]
        alone = Group({**group, "params": [parameter]}, group.options)
        with _as_upper_halves():
            self._step_group(alone, rng_stream, (group_number, rng_stream))

    def _step_group(self, group: Group, rng_stream: int, key: tuple[int, int | None]) -> None:
        """The step of a group: the cached one if it still stands, else an update of each batch."""
        cache = self._step_caches.get(key)
        if cache is not None and self._repeat(cache, group, rng_stream):
            return
        self._step_caches.pop(key, None)
        before = change_count(self.state)
        others = self._others(group)
        if others:
            alone = Group({**group, "params": others}, group.options)
            stock.step(self, alone, self._scaling(group))
            if len(others) == len(group["params"]):
                return
        launches: list[step_cache.CachedLaunch] = []
        is_repeatable = before is not None and not others
        # States and plans are made once and stay: nothing to collect among them.
        is_planned = step_cache.may_plan(group["params"])
        with torch.no_grad(), _garbage.paused() if is_planned else nullcontext():
            if is_planned:
                states.place_steps(group["params"], self.state)
            for update, repeats in self._updates(group, rng_stream, {*map(id, others)}):
                made = self._executor.run(update)
                is_repeatable &= repeats and made is not None
                launches += made or []
        now = change_count(self.state)
        if before is None or now is None:
            return
        for other in self._step_caches.values():
            other.settle(before, now)
        if is_repeatable and launches:
            self._step_caches[key] = StepCache(
                *(launches, counted(self.state), group["params"], rng_stream),
                *(self._settings(group), self._store.master_weight),
            )

    def _repeat(self, cache: StepCache, group: Group, rng_stream: int) -> bool:
        """Launches a cached step, unless the group has to be looked at again."""
        hyper, settings = self._hyper(group), self._settings(group)
        if not cache.is_current(self.state, group["params"], rng_stream, settings, hyper):
            return False
        scaling = self._scaling(group)
        cache.run(lambda launch: self._executor.launch(launch, hyper, scaling))
        return True

    def _settings(self, group: Group) -> Hashable:
        """What decides, beside hyper-parameters, how the group's step is done."""
        options = (group["master_weights"], group["state_dtype"], group["seed"])
        is_differentiable = bool(group.get("differentiable"))
        return (
            *(self._rule(group), self._names(group), group["maximize"], is_differentiable),
            *options,
        )

    def _updates(
        self, group: Group, rng_stream: int, others: Set[int]
    ) -> Iterator[tuple[Update, bool]]:
        """Updates of all parameters that have gradients, but for those whose ids are `others`.

        Beside each, whether the next step can be the same.
        """
        names = self._names(group)
        batch = Batch.of(names)
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and id(parameter) not in others:
                state = self.state[parameter]
                self._begin(parameter, group, state, names)
                low_bits = self._store.current_low_bits(parameter, group)
                batch.add(parameter, state, names, rng_stream + position, low_bits)
        yield self._update(batch, group), True

    def _update(self, batch: Batch, group: Group, flags: tuple[bool, ...] = ()) -> Update:
        """flags: hyper-parameters beyond those of the group."""
        is_random = group["state_dtype"] == torch.bfloat16
        return Update(
            *(self._rule(group), batch, self._hyper(group), flags),
            *(self._scaling(group), is_random, group["seed"]),
        )

    def _scaling(self, group: Group) -> Scaling:
        return Scaling(
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            -1.0 if group["maximize"] else 1.0,
            self._clipper.factor,
        )

    def _begin(self, parameter: Tensor, group: Group, state: State, names: Sequence[str]) -> None:
        """Makes the states that the parameter lacks."""
        if "step" not in state:
            state["step"] = self._store.first_step(parameter)
        for name in names:
            if name not in state:
                self._write(parameter, group, name, self._initial(name, parameter, group))
        if names and state[names[0]].stride() != parameter.stride():
            # The parameter was given memory of another layout.
            self._conform(parameter, group)

    def _write(self, parameter: Tensor, group: Group, name: str, value: Tensor) -> None:
        """Keeps `value` as the parameter's state `name`, in the group's format."""
        dtype = self._state_dtype(parameter, group, name)
        self._store.write(self.state[parameter], parameter, name, value, dtype)

    def _conform(self, parameter: Tensor, group: Group) -> None:
        """Brings the parameter's states, if there are any, into the group's formats."""
        state = self.state.get(parameter)
        if not state or not parameter.is_floating_point():
            return
        for name in self.state_names:
            kept = state.get(name)
            if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                self._write(parameter, group, name, self._store.read(state, name))

    def _others(self, group: Group) -> list[Tensor]:
        """The parameters with gradients that torch's class steps, as it would without us."""
        having = [own for own in group["params"] if own.grad is not None]
        if group.get("differentiable"):
            return having
        has_choice = stock.stock_class(type(self)) is not None and not stock.has_formats(group)
        return [
            own
            for own in having
            if own.grad.layout is not torch.strided
            or own.is_complex()
            or (has_choice and not step_cache.has_kernel(own))
        ]

    @never_compiled
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        scaler: Any = None,
    ) -> Tensor:
        """Clips gradients in the next step: they are read once here and written nowhere.

        The step multiplies all gradients by min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm_`
        would before it. The last call before a step counts; `zero_grad` and steps end it, and
        gradients must not change in between.

        Args:
            max_norm: of the gradients of all parameters together.
            norm_type: order of the norm; others than 2 are computed by torch.
            error_if_nonfinite: raises RuntimeError for a norm that is not finite.
            scaler: the torch.amp.GradScaler of the gradients; its scale is divided out of the norm,
                unless `scaler.unscale_` has divided it out of the gradients.

        Returns:
            The norm before clipping, of gradients that are not scaled.
        """
        if self._release is not None:
            self._release.refuse("clip_grad_norm_")
        scale = scaler._get_scale_async() if is_scaled_by(scaler, self) else None
        with torch.no_grad(), _as_upper_halves():
            return self._clipper.clip(
                self._parameters(), max_norm, norm_type, error_if_nonfinite, scale
            )

    @never_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also ends a clipping that no step has applied."""
        self._clipper.cancel()
        with _as_upper_halves():
            without_compiler(super().zero_grad)(set_to_none)

    def _takes_scale(self) -> bool:
        """Whether a GradScaler leaves its scale, and what was not finite, to the step.

        So it is where torch would refuse or a GPU would be waited for, and where this optimizer is
        to clip or steps in backward. Else the scaler divides it out itself, as it does for torch's
        classes, and Lightning may clip in between.
        """
        if self._clipper.is_pending or self._release is not None:
            return True
        return any(
            parameter.dtype == torch.float16 or devices.find(parameter.device) is not None
            for parameter in self._parameters()
        )

    def _set_takes_scale(self, value: bool) -> None:
        """torch's classes say so when they are made with `fused=True`; it changes nothing here."""

    counts_its_writes = True
    """What core/fused_steps.py asks."""

    _step_supports_amp_scaling: Any = property(_takes_scale, _set_takes_scale)
    """What a GradScaler asks; torch's classes declare it as an attribute."""

    def low_bits(self, parameter: Tensor) -> Tensor | None:
        """The low bits of a split parameter's master weight, int16; None where it has none."""
        return self._store.low_bits(parameter)

    def master_weight(self, parameter: Tensor) -> Tensor:
        """The exact float32 weight: of a split parameter both parts together, else a copy."""
        self._group_of(parameter)
        return self._store.weight(parameter)

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
        self._store.set_weight(parameter, weight, group)

    def memory_report(self) -> dict[str, float]:
        """Bytes per element of the parameters, by kind: parameters, low bits, each state.

        Of sharded parameters, this process's shards.
        """
        return self._store.memory_report(self._parameters(), self.state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's class has it: states decoded, under the same keys.

        The low bits of a split parameter are added as `low_half`, without which its float32 weight
        would be lost (of a sharded parameter as int32).
        """
        with checkpoints.decoded_states(self, self._groups(), self._store):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of torch's, into the formats that are in use here.

        The low bits of a split parameter come from `low_half` where the checkpoint has it;
        otherwise the parameter counts as exact. Load the model before the optimizer.
        """
        options = [{name: group[name] for name in OPTIONS} for group in self._groups()]
        before = {**super().__getstate__()}
        masters = {**self._store.masters}

        def conform() -> None:
            loaded = zip(self.param_groups, options, strict=True)
            groups = [Group(group, own) for group, own in loaded]
            self.param_groups = [*groups]
            for group in groups:
                for parameter in group["params"]:
                    self._options_given[parameter] = group.options
                    self._store.masters.pop(parameter, None)
                    if parameter in self.state:
                        self._adopt(parameter, group)

        try:
            with checkpoints.hidden_states(self, conform):
                super().load_state_dict(state_dict)
        except Exception:
            self.__dict__.update(before)
            self._store.masters = masters
            raise

    def _adopt(self, parameter: Tensor, group: Group) -> None:
        """Takes over the parameter's states from a checkpoint that was loaded."""
        checkpoints.adopt(
            *(type(self).__name__, parameter, self.state[parameter], group, self._store),
            lambda name: self._state_dtype(parameter, group, name),
        )

    def __getstate__(self) -> dict[str, Any]:
        parameters = self._parameters()
        own = {
            "_options": self._options,
            "_options_given": self._options_given,
            "_low_halves": {p: self.low_bits(p) for p in parameters if p in self._store.masters},
            "_split_in_model": [p for p in parameters if type(p) is SplitParameter],
            "_releases": self._release is not None,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        low_bits, in_model = (state.pop(k, ()) for k in ("_low_halves", "_split_in_model"))
        super().__setstate__(state)
        self.state = counted(self.state)
        if "_store" not in self.__dict__:
            self._make_parts()
        # Copies of split parameters are plain float32, until a copy of the optimizer steps them.
        for parameter in in_model:
            if type(parameter) is not SplitParameter:
                split_parameter.split(parameter)
        for parameter, own in dict(low_bits).items():
            self._store.set_low_bits(parameter, own)
        if state.get("_releases"):
            self._release_gradients()
