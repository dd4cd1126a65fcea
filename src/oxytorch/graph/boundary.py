"""What stands between modules that compute in different dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from .forward import Forward


@dataclass(frozen=True)
class Boundary:
    """What happens to the floating-point tensors that a module is given, and to those it returns.

    takes: the dtype that they are converted to, or None. least_dims: dimensions that a tensor has
    to have for that; those of fewer are often positions or frequencies, which would lose too much.
    gives_back: whether the module returns the dtype that it was given; `otherwise` where it was
    given no such tensor, if that is a dtype.
    """

    takes: torch.dtype | None = None
    gives_back: bool = False
    least_dims: int = 0
    otherwise: torch.dtype | None = None


class BoundaryForward(Forward):
    """A module's forward, its own or the one that a pass gave it, within its boundary."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        super().__init__(module)
        is_script = isinstance(module, torch.jit.ScriptModule)  # keeps a method in its dictionary
        self.inner = self.own if is_script else module.__dict__.get("forward", self.own)
        self.boundary = boundary

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return self.module._c._get_method("forward")(*args, **kwargs)
        return super().own(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            return self.inner(*args, **kwargs)
        takes, least = self.boundary.takes, self.boundary.least_dims
        given = None
        if self.boundary.gives_back:
            given = first_dtype(args, kwargs) or self.boundary.otherwise
        if takes is not None:
            args = tuple([_taken(value, takes, least) for value in args])
            kwargs = {name: _taken(value, takes, least) for name, value in kwargs.items()}
        result = self.inner(*args, **kwargs)
        return result if given is None else given_back(result, given)


def first_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the first floating-point tensor among arguments."""
    for value in (*args, *kwargs.values()):
        for leaf in value if type(value) in (tuple, list) else (value,):
            leaf = leaf.data if isinstance(leaf, PackedSequence) else leaf
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return leaf.dtype
    return None


def given_back(result: Any, dtype: torch.dtype) -> Any:
    """A result with its floating-point tensors converted."""
    if type(result) is Tensor:
        return result.to(dtype) if result.is_floating_point() else result
    return pytree.tree_map(
        lambda leaf: _taken(leaf, dtype, 0),
        result,
        is_leaf=lambda value: isinstance(value, PackedSequence),
    )


def _taken(value: Any, dtype: torch.dtype, least_dims: int) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() >= least_dims:
            return value.to(dtype)
        return value
    if isinstance(value, PackedSequence):
        return value.to(dtype)
    if type(value) is tuple:
        return tuple([_taken(item, dtype, least_dims) for item in value])
    return value
