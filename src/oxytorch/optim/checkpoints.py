"""Checkpoints that torch's classes read and write too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import sharding
from .groups import OPTIONS, Group
from .split_parameter import SplitParameter
from .states import State, StatefulOptimizer
from .batch import LOW_HALF, SCALES


@dataclass(frozen=True)
class _Kept:
    """Carries a tensor through torch's load_state_dict, which would cast it."""

    tensor: Tensor


class CheckpointedOptimizer(StatefulOptimizer):
    """An optimizer with the checkpoints of torch's class, whatever its formats."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's class has it: states decoded, under the same keys.

        A split parameter's lower half is added as `low_half`, without which its float32 weight
        would be lost (of a sharded parameter as int32).
        """

        def decode(optimizer: Optimizer, packed: dict[str, Any]) -> None:
            states = packed["state"]
            for group, own in zip(packed["param_groups"], self._groups(), strict=True):
                for name in OPTIONS:
                    group.pop(name, None)
                has_format = any(own[name] for name in OPTIONS)
                for index, parameter in zip(group["params"], own["params"], strict=True):
                    state = states.pop(index, {})
                    # Of those that the model's state dictionary shows as whole weights, no halves.
                    if type(parameter) is not SplitParameter:
                        low = self.low_half(parameter)
                        state = state if low is None else {**state, LOW_HALF: low}
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
        if low is not None and sharding.is_sharded(low):
            # The collectives that gather a checkpoint know no int16.
            plain[LOW_HALF] = low.to(torch.int32)
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of torch's, into the formats that are in use here.

        A split parameter's lower half comes from `low_half` where the checkpoint has it; otherwise
        the parameter counts as exact. Load the model before the optimizer.
        """
        options = [{name: group[name] for name in OPTIONS} for group in self._groups()]

        def keep(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            """Hides states from torch, which would round them to the parameter's dtype."""
            return {**loaded, "state": {k: _hide(v) for k, v in loaded["state"].items()}}

        def conform(optimizer: Optimizer) -> None:
            loaded = zip(self.param_groups, options, strict=True)
            groups = [Group(group, own) for group, own in loaded]
            self.param_groups = [*groups]
            for group in groups:
                for parameter in group["params"]:
                    self._options_given[parameter] = group.options
                    self._halves.pop(parameter, None)
                    if parameter in self.state:
                        self._adopt(parameter, group)

        before = {**self.__getstate__(), "_halves": {**self._halves}}
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
        if type(parameter) is not SplitParameter and self._is_split(parameter, group):
            halves = self._keep_halves(parameter, None)
            # Another class than ours would have rounded it to the parameter's dtype.
            if isinstance(low, _Kept) and low.tensor.dtype in (torch.int16, torch.int32):
                given = sharding.shard_like(parameter, low.tensor, LOW_HALF)
                halves.low.copy_(sharding.local(given))
                halves.begin()


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
