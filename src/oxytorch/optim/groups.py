"""Parameter groups: how their tensors are kept, and their hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .gpu import step_cache

OPTIONS = ("master_weights", "state_dtype", "seed")
"""What a group knows beyond the keys that torch's class gives it."""


class Group(dict[str, Any]):
    """A parameter group of torch whose OPTIONS are read and set like keys but are none.

    Checkpoints of torch have no such keys, and torch.distributed.checkpoint asks a checkpoint for
    every key that a group has.
    """

    def __init__(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in group.items() if key not in OPTIONS})
        self.options = {name: group.get(name, options[name]) for name in OPTIONS}

    def __missing__(self, key: str) -> Any:
        return self.options[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in OPTIONS:
            self.options[key] = value
        else:
            super().__setitem__(key, value)

    def copy(self) -> Group:
        """Another group with the same values and options."""
        return Group(self, self.options)

    def __or__(self, other: Mapping[str, Any]) -> Group:  # type: ignore[override]
        return Group({**self, **other}, self.options)


def hold_list(group: dict[str, Any]) -> None:
    """Puts a list in the place of parameters that may be read only once, as torch does later."""
    if "params" in group and not isinstance(group["params"], Tensor | set):
        group["params"] = list(group["params"])


def rate(group: Group) -> float | Tensor:
    """The group's learning rate: a tensor on a device with kernels stays there."""
    value: float | Tensor = group["lr"]
    if isinstance(value, Tensor) and step_cache.is_planned(value):
        return value
    return float(value)


def check_at_least_zero(name: str, **values: float | Tensor) -> None:
    """Refuses negative hyper-parameters and NaN, and tensors of several elements."""
    for argument, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{name}: expected {argument} with one element, got {list(value.shape)}"
            )
        if not value >= 0.0:
            raise ValueError(f"{name}: expected {argument} >= 0, got {value}")
