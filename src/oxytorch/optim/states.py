"""The states of an optimizer and the formats in which they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.watched import watch
from ..ops.optimizer_step import formats
from ..ops.optimizer_step.reference import operands_of
from . import sharding
from .batch import SCALES
from .gpu.step_cache import is_planned
from .groups import Group
from .master_weight import MasterWeight
from .split_parameter import SplitParameter

State = dict[str, Any]

LOW_BITS = "low_half"
"""What checkpoints and reports call the low bits of a master weight."""

_STEPS_TOGETHER = 256
"""Numbers of steps that share an allocation on a device."""

LEAST_CODED = 4096
"""Elements below which a state stays float32 where 8-bit codes are asked for: it weighs little."""


def is_split(parameter: Tensor, group: Group) -> bool:
    """Whether the parameter is the upper half of a master weight."""
    if type(parameter) is SplitParameter:
        return True
    return group["master_weights"] == "split" and parameter.dtype == torch.bfloat16


def state_dtype(parameter: Tensor, group: Group) -> torch.dtype:
    """The dtype of the parameter's states; int8 stands for codes."""
    wanted: torch.dtype | None = group["state_dtype"]
    if wanted is None:
        return torch.float32 if is_split(parameter, group) else parameter.dtype
    if wanted == torch.int8 and parameter.numel() < LEAST_CODED:
        return torch.float32
    return wanted


class StateStore:
    """Keeps states in the formats of their groups, and the master weights of parameters.

    names: of the states, in the order of the rule's operands.
    masters: of the parameters that are split here; what happens to states leaves them alone, and
        parameters that `oxytorch.optimize` splits keep their own.
    """

    def __init__(self, names: Sequence[str], rule: str) -> None:
        _, _, *never_negative = operands_of(rule).values()
        self._unsigned = {n for n, unsigned in zip(names, never_negative, strict=True) if unsigned}
        self.names = names
        self.masters: dict[Tensor, MasterWeight] = {}
        self._fresh_steps: dict[torch.device, list[Tensor]] = {}

    def write(
        self, state: State, parameter: Tensor, name: str, value: Tensor, dtype: torch.dtype
    ) -> None:
        """Keeps `value` as the parameter's state `name`."""
        state.pop(name + SCALES, None)
        if value.layout is not torch.strided:
            # Of sparse gradients, which go torch's own way.
            state[name] = value
            return
        value = _aligned(parameter, value, name)
        if dtype == torch.int8:
            codes, state[name + SCALES] = formats.encode(
                sharding.local(value), name not in self._unsigned
            )
            state[name] = sharding.placed_like(value, codes)
        else:
            state[name] = value.to(dtype)

    def read(self, state: State, name: str) -> Tensor:
        """A state as torch keeps it."""
        kept: Tensor = state[name]
        scales = state.get(name + SCALES)
        if scales is None:
            return kept
        return sharding.placed_like(kept, formats.decode(sharding.local(kept), scales))

    def plain(self, state: State, has_format: bool) -> State:
        """All states as torch keeps them; float32 where they have a format of ours."""
        plain = {key: value for key, value in state.items() if not key.endswith(SCALES)}
        for name in self.names:
            if isinstance(plain.get(name), Tensor):
                value = self.read(state, name)
                plain[name] = value.float() if has_format else value
        return plain

    def first_step(self, parameter: Tensor) -> Tensor:
        """The number of steps that were done, none; where kernels count, beside others."""
        if not is_planned(parameter):
            # As torch has it.
            is_wide = torch.get_default_dtype() == torch.float64
            return torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device="cpu")
        fresh = self._fresh_steps.setdefault(parameter.device, [])
        if not fresh:
            fresh.extend(torch.zeros(_STEPS_TOGETHER, device=parameter.device).unbind())
        return fresh.pop()

    def master_weight(self, parameter: Tensor) -> MasterWeight | None:
        """The master weight of a parameter that has one, as it is at the moment."""
        if type(parameter) is SplitParameter:
            master: MasterWeight | None = parameter._master
        else:
            master = self.masters.get(parameter)
        if master is not None:
            if master.upper.data_ptr() != sharding.peek(parameter).data_ptr():
                return self.begin_master(parameter)
            # The memory may have moved with the parameter, to where processes share it.
            master.address = master.upper.data_ptr()
            master.settle()
        return master

    def begin_master(self, parameter: Tensor, low_bits: Tensor | None = None) -> MasterWeight:
        """A new master weight, whose upper half the parameter is; low bits: zeros if None."""
        if type(parameter) is SplitParameter:
            parameter._master.leave()
        master = MasterWeight(parameter, low_bits)
        if type(parameter) is SplitParameter:
            parameter._master = master
        else:
            watch(parameter)
            self.masters[parameter] = master
        return master

    def current_low_bits(self, parameter: Tensor, group: Group) -> Tensor | None:
        """The low bits that a step updates, where the parameter is split.

        Values that were written to the parameter since the last step count as exact, and so do
        those with which it begins.
        """
        # Every parameter comes here in every step: what has not changed takes few operations.
        if type(parameter) is SplitParameter:
            master: MasterWeight | None = parameter._master
        elif group.options["master_weights"] is None:
            if self.masters:
                self.masters.pop(parameter, None)
            return None
        else:
            master = self.masters.get(parameter)
        if (
            master is not None
            and master.upper._version - master.low_bits._version == master.lead
            and parameter.data_ptr() == master.address
        ):
            return master.low_bits
        if not is_split(parameter, group):
            return None
        return (self.master_weight(parameter) or self.begin_master(parameter)).low_bits

    def low_bits(self, parameter: Tensor) -> Tensor | None:
        """The low bits of a split parameter, placed as it is; None where it has none."""
        master = self.master_weight(parameter)
        return None if master is None else sharding.placed_like(parameter, master.low_bits)

    def set_low_bits(self, parameter: Tensor, low_bits: Tensor) -> None:
        """Makes `low_bits` (int16, placed as the parameter) those that steps update."""
        master = self.master_weight(parameter)
        if master is None:
            self.begin_master(parameter, sharding.local(low_bits))
        else:
            master.low_bits.copy_(sharding.local(low_bits))
            master.begin()

    def weight(self, parameter: Tensor) -> Tensor:
        """The float32 weight: of a split parameter both parts together, else a copy."""
        master = self.master_weight(parameter)
        if master is None:
            return parameter.detach().float()
        return sharding.placed_like(parameter, master.join())

    def set_weight(self, parameter: Tensor, weight: Tensor, group: Group) -> None:
        """Gives the parameter a float32 value, all bits of it if it is split."""
        weight = sharding.shard_like(parameter, weight, "weight")
        if type(parameter) is SplitParameter or not is_split(parameter, group):
            parameter.copy_(weight)
            return
        master = self.master_weight(parameter) or self.begin_master(parameter)
        master.set(sharding.local(_aligned(parameter, weight.float(), "weight")))

    def memory_report(
        self, parameters: Iterable[Tensor], states: dict[Tensor, State]
    ) -> dict[str, float]:
        """Bytes per element by kind; see `FusedOptimizer.memory_report`."""
        total: dict[str, int] = {"parameters": 0}
        elements = 0
        for parameter in parameters:
            shard = sharding.local(parameter)
            elements += shard.numel()
            total["parameters"] += shard.nbytes
            master = self.master_weight(parameter)
            if master is not None:
                total[LOW_BITS] = total.get(LOW_BITS, 0) + master.low_bits.nbytes
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    total[key] = total.get(key, 0) + sharding.local(value).nbytes
        report = {kind: count / max(elements, 1) for kind, count in total.items()}
        return {**report, "total": sum(report.values())}


def place_steps(parameters: Iterable[Tensor], states: Mapping[Tensor, State]) -> None:
    """Brings numbers of steps, which torch may have left on the host, to where kernels count."""
    strays: dict[torch.device, list[State]] = {}
    for parameter in parameters:
        step = states.get(parameter, {}).get("step")
        if isinstance(step, Tensor) and parameter.grad is not None:
            is_there = step.device == parameter.device and step.dtype == torch.float32
            if not is_there and is_planned(parameter):
                strays.setdefault(parameter.device, []).append(states[parameter])
    for device, stray in strays.items():
        values = torch.stack([state["step"].reshape(()).float().cpu() for state in stray])
        for state, step in zip(stray, values.to(device, non_blocking=True).unbind(), strict=True):
            state["step"] = step


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
        raise ValueError(f"{name}: expected an integer as seed, got {group['seed']!r}")
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
