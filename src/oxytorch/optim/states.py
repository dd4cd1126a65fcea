"""The states of an optimizer and the formats in which they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.optimizer_step import formats
from . import sharding, split_parameter
from .clipping import ClippingOptimizer
from .groups import Group
from .master_weight import Halves
from .split_parameter import SplitParameter
from .batch import LOW_HALF, SCALES

State = dict[str, Any]

LEAST_CODED = 4096
"""Elements below which a state stays float32 where 8-bit codes are asked for: it weighs little."""

UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "variance"})
"""States that are never negative."""


class StatefulOptimizer(ClippingOptimizer):
    """An optimizer whose groups say in which formats states and weights are kept."""

    state_names: ClassVar[tuple[str, ...]]
    _options: dict[str, Any]
    # Of groups that were given options, by parameter: who copies a group as a plain dictionary
    # keeps its parameters and loses the options.
    _options_given: dict[Tensor, dict[str, Any]]
    # Of parameters that are split here. What happens to states leaves them alone, and those that
    # `oxytorch.optimize` splits keep their own.
    _halves: dict[Tensor, Halves]

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

    def _names(self, group: Group) -> tuple[str, ...]:
        """The states that the group's options use, in the order of the rule's operands."""
        return self.state_names

    def _initial(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        """The first value of a state, in the dtype that torch would give it."""
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _is_split(self, parameter: Tensor, group: Group) -> bool:
        if type(parameter) is SplitParameter:
            return True
        return group["master_weights"] == "split" and parameter.dtype == torch.bfloat16

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
            kept = state.get(name)
            if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                self._store(parameter, group, name, self._value(state, name))

    def _kept_halves(self, parameter: Tensor) -> Halves | None:
        """The halves of a parameter that has some, as they are at the moment."""
        if type(parameter) is SplitParameter:
            halves: Halves | None = parameter._halves
        else:
            halves = self._halves.get(parameter)
        if halves is not None:
            if halves.upper.data_ptr() != sharding.peek(parameter).data_ptr():
                return self._keep_halves(parameter, None)
            # The memory may have moved with the parameter, to where processes share it.
            halves.address = halves.upper.data_ptr()
            halves.settle()
        return halves

    def _keep_halves(self, parameter: Tensor, low: Tensor | None) -> Halves:
        """Begins anew with the parameter's values as upper half; low: zeros if None."""
        if type(parameter) is SplitParameter:
            parameter._halves.leave()
        halves = Halves(parameter, low)
        if type(parameter) is SplitParameter:
            parameter._halves = halves
        else:
            split_parameter.watch(parameter)
            self._halves[parameter] = halves
        return halves

    def _current_low(self, parameter: Tensor, group: Group) -> Tensor | None:
        """The lower half that a step updates, where the parameter is split.

        Values that were written to the parameter since the last step count as exact, and so do
        those with which it begins.
        """
        # Every parameter comes here in every step: what is as it was is told in few words.
        if type(parameter) is SplitParameter:
            halves: Halves | None = parameter._halves
        elif group.options["master_weights"] is None:
            if self._halves:
                self._halves.pop(parameter, None)
            return None
        else:
            halves = self._halves.get(parameter)
        if (
            halves is not None
            and halves.upper._version - halves.low._version == halves.lead
            and parameter.data_ptr() == halves.address
        ):
            return halves.low
        if not self._is_split(parameter, group):
            return None
        return (self._kept_halves(parameter) or self._keep_halves(parameter, None)).low

    def low_half(self, parameter: Tensor) -> Tensor | None:
        """The lower half of a split parameter, or None where it has none or only zeros."""
        halves = self._kept_halves(parameter)
        return None if halves is None else sharding.placed_like(parameter, halves.low)

    def set_low_half(self, parameter: Tensor, low: Tensor) -> None:
        """Makes `low` (int16, placed as the parameter) the lower half that steps update."""
        halves = self._kept_halves(parameter)
        if halves is None:
            self._keep_halves(parameter, sharding.local(low))
        else:
            halves.low.copy_(sharding.local(low))
            halves.begin()

    def _store(self, parameter: Tensor, group: Group, name: str, value: Tensor) -> None:
        """Keeps `value` as the parameter's state `name`, in the group's format."""
        state = self.state[parameter]
        state.pop(name + SCALES, None)
        if value.layout is not torch.strided:
            # Of sparse gradients, which go torch's own way.
            state[name] = value
            return
        dtype = self._state_dtype(parameter, group, name)
        value = _aligned(parameter, value, name)
        if dtype == torch.int8:
            codes, state[name + SCALES] = formats.encode(
                sharding.local(value), name not in UNSIGNED
            )
            state[name] = sharding.placed_like(value, codes)
        else:
            state[name] = value.to(dtype)

    def _value(self, state: State, name: str) -> Tensor:
        """A state as torch keeps it."""
        kept: Tensor = state[name]
        scales = state.get(name + SCALES)
        if scales is None:
            return kept
        return sharding.placed_like(kept, formats.decode(sharding.local(kept), scales))

    def _group_of(self, parameter: Tensor) -> Group:
        for group in self._groups():
            if any(own is parameter for own in group["params"]):
                return group
        raise ValueError(
            f"{type(self).__name__}: expected one of the optimizer's own parameters, "
            f"got another tensor of shape {list(parameter.shape)}"
        )

    def master_weight(self, parameter: Tensor) -> Tensor:
        """The exact float32 weight: of a split parameter both halves together, else a copy."""
        self._group_of(parameter)
        halves = self._kept_halves(parameter)
        if halves is None:
            return parameter.detach().float()
        return sharding.placed_like(parameter, halves.join())

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
        weight = sharding.shard_like(parameter, weight, "weight")
        if type(parameter) is SplitParameter or not self._is_split(parameter, group):
            parameter.copy_(weight)
            return
        halves = self._kept_halves(parameter) or self._keep_halves(parameter, None)
        halves.set(sharding.local(_aligned(parameter, weight.float(), "weight")))

    def memory_report(self) -> dict[str, float]:
        """Bytes per element of the parameters, by kind: parameters, low halves, each state.

        Of sharded parameters, this process's shards.
        """
        total: dict[str, int] = {}
        elements = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                shard = sharding.local(parameter)
                elements += shard.numel()
                total["parameters"] = total.get("parameters", 0) + shard.nbytes
                halves = self._kept_halves(parameter)
                if halves is not None:
                    total[LOW_HALF] = total.get(LOW_HALF, 0) + halves.low.nbytes
                for key, value in self.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and key != "step":
                        total[key] = total.get(key, 0) + sharding.local(value).nbytes
        report = {kind: count / max(elements, 1) for kind, count in total.items()}
        return {**report, "total": sum(report.values())}


def _aligned(parameter: Tensor, value: Tensor, name: str) -> Tensor:
    """`value` with the parameter's strides, sharded as the parameter is."""
    value = sharding.shard_like(parameter, value, name)
    aligned = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    is_aligned = sharding.local(aligned).stride() == sharding.local(value).stride()
    return value if is_aligned else aligned.copy_(value)


def check_options(name: str, group: Group) -> None:
    """Refuses formats that do not exist."""
    if group["master_weights"] not in (None, "split"):
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
