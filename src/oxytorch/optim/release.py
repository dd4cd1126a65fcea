"""Gradient release: the step runs inside backward, a parameter at a time.

As soon as a parameter's gradient is complete, the parameter is updated and the gradient freed, so
that gradients of the whole model never exist together.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from . import sharding


class Release:
    """The hooks of one optimizer. Parameters do not keep the optimizer alive."""

    def __init__(
        self,
        optimizer: Optimizer,
        update_one: weakref.WeakMethod[Callable[[Tensor, int, int], None]],
    ) -> None:
        """update_one: updates a parameter; takes the numbers of its group and its random stream."""
        self._update_one = update_one
        weakref.finalize(optimizer, self.remove).atexit = False
        self._name = type(optimizer).__name__
        # Where a parameter stands: the number of its group, and of its stream of random numbers.
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._done: set[Tensor] = set()

    def watch(self, groups: Iterable[dict[str, Any]]) -> None:
        """Hooks the parameters that need a gradient and are not hooked yet."""
        rng_stream = 0
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                self._places[parameter] = (number, rng_stream)
                rng_stream += 1
                if parameter.requires_grad and parameter not in self._handles:
                    handle = parameter.register_post_accumulate_grad_hook(_Hook(self))
                    self._handles[parameter] = handle

    def remove(self) -> None:
        """Takes the hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._places.clear()

    def update(self, parameter: Tensor) -> None:
        """Updates a parameter whose gradient is complete, and frees the gradient."""
        update_one = self._update_one()
        if update_one is None:
            return
        if parameter in self._done:
            raise RuntimeError(
                f"{self._name}: a second backward pass before step(): with release_gradients=True "
                "the first one has updated the parameters already. Call step() after each backward "
                "pass; gradients cannot be accumulated"
            )
        _refuse_unreduced(self._name, parameter)
        self._done.add(parameter)
        update_one(parameter, *self._places[parameter])
        parameter.grad = None

    def end_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """The optimizer's step() was called: the next backward pass may come."""
        self._done.clear()
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None
        # Some may have been frozen when they were given to the optimizer.
        self.watch(groups)

    def refuse(self, what: str) -> None:
        """Raises an error: `what` needs all gradients together."""
        raise RuntimeError(
            f"{self._name}: {what} needs the gradients of all parameters at once; with "
            "release_gradients=True each is applied and freed inside backward"
        )


class _Hook:
    """Called by autograd when the parameter's gradient is complete."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def __call__(self, parameter: Tensor) -> None:
        self._release.update(parameter)


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Raises an error if one of the parameters has its gradient released."""
    for parameter in parameters:
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            if isinstance(hook, _Hook):
                hook._release.refuse("clip_grad_norm_")


def _refuse_unreduced(name: str, parameter: Tensor) -> None:
    """DistributedDataParallel sums gradients over processes later than they are released."""
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
        and not sharding.is_sharded(parameter)
    ):
        raise RuntimeError(
            f"{name}: release_gradients=True with several processes needs sharded parameters "
            "(fully_shard): DistributedDataParallel sums gradients only after they would be freed"
        )
