"""Checkpoints that torch's classes read and write too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import sharding
from .batch import SCALES
from .groups import OPTIONS, Group
from .split_parameter import SplitParameter
from .states import LOW_BITS, State, StateStore, is_split


@dataclass(frozen=True)
class _Hidden:
    """Carries a tensor through torch's load_state_dict, which would cast it."""

    tensor: Tensor


@contextmanager
def decoded_states(
    optimizer: Optimizer, groups: Sequence[Group], store: StateStore
) -> Iterator[None]:
    """State dictionaries that are made inside have states as torch's class has them."""

    def decode(_: Optimizer, packed: dict[str, Any]) -> None:
        states = packed["state"]
        for group, own in zip(packed["param_groups"], groups, strict=True):
            for name in OPTIONS:
                group.pop(name, None)
            has_format = any(own[name] for name in OPTIONS)
            for index, parameter in zip(group["params"], own["params"], strict=True):
                state = store.plain(states.pop(index, {}), has_format)
                # Of those that the model's state dictionary shows as whole weights, no low bits.
                if type(parameter) is not SplitParameter:
                    low_bits = store.low_bits(parameter)
                    if low_bits is not None:
                        # The collectives that gather a checkpoint know no int16.
                        is_sharded = sharding.is_sharded(low_bits)
                        state[LOW_BITS] = low_bits.to(torch.int32) if is_sharded else low_bits
                if state:
                    states[index] = state

    with optimizer.register_state_dict_post_hook(decode, prepend=True):
        yield


@contextmanager
def hidden_states(optimizer: Optimizer, conform: Callable[[], None]) -> Iterator[None]:
    """Checkpoints that are loaded inside keep the dtypes of their states until `adopt`.

    torch would round them to the dtype of the parameter. conform: called once torch has loaded one,
    before other hooks see it.
    """

    def hide(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        return {**loaded, "state": {k: _hide(v) for k, v in loaded["state"].items()}}

    with (
        optimizer.register_load_state_dict_pre_hook(hide),
        optimizer.register_load_state_dict_post_hook(lambda _: conform(), prepend=True),
    ):
        yield


def adopt(
    name: str,
    parameter: Tensor,
    state: State,
    group: Group,
    store: StateStore,
    dtype_of: Callable[[str], torch.dtype],
) -> None:
    """Takes over a parameter's hidden states; name: of the optimizer's class, for errors."""
    for key, value in state.items():
        if isinstance(value, _Hidden):
            wanted = _state_shape(parameter, key)
            if value.tensor.shape != wanted:
                raise ValueError(
                    f"{name}: expected {key} of shape {list(wanted)} "
                    f"in the checkpoint, got {list(value.tensor.shape)}"
                )
    low_bits = state.pop(LOW_BITS, None)
    if isinstance(state.get("step"), Tensor):
        # torch leaves it shared with the checkpoint, and so with who made that.
        state["step"] = state["step"].clone()
    for key, value in list(state.items()):
        if not isinstance(value, _Hidden):
            continue
        tensor = value.tensor.to(parameter.device, copy=True)
        if key in store.names:
            store.write(state, parameter, key, tensor, dtype_of(key))
        else:
            state[key] = tensor
    if type(parameter) is not SplitParameter and is_split(parameter, group):
        master = store.begin_master(parameter)
        # Another class than ours would have rounded them to the parameter's dtype.
        if isinstance(low_bits, _Hidden) and low_bits.tensor.dtype in (torch.int16, torch.int32):
            given = sharding.shard_like(parameter, low_bits.tensor, LOW_BITS)
            master.low_bits.copy_(sharding.local(given))
            master.begin()


def _hide(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        key: _Hidden(value) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
        # A flat checkpoint of torch.distributed has an empty entry for each key that we have.
        if not str(key).endswith(SCALES)
    }


def _state_shape(parameter: Tensor, key: str) -> torch.Size:
    """The shape that a state has to have; factors of Adafactor are smaller than the parameter."""
    shape = list(parameter.shape)
    if key == "row_var":
        shape[-1:] = [1]
    elif key == "col_var":
        shape[-2:-1] = [1]
    return torch.Size(shape)
