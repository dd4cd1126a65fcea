"""The record of an op: what tests, benchmarks, `oxytorch info` and the dispatcher read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _binding
from ._autocast import AS_GIVEN, Autocast


@dataclass(frozen=True)
class Sample:
    """One call of an op: its arguments, and a name for the test's id such as `3x7`."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The least work of one call.

    bytes: each input read once, each output written once.
    operations: arithmetic operations.
    """

    bytes: int
    operations: int


def nbytes(value: object) -> int:
    """The bytes of a tensor; of those in a list, a tuple or a mapping; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


@dataclass(frozen=True)
class Op:
    """A mathematical operation with a function and a reference in plain PyTorch.

    function: what is called; its name is the op's name, folder, schema and test id.
    reference: the same in plain PyTorch, with the same signature; also runs in float64.
    samples: called with a dtype and a size ("test", "cache" or "memory"), yields calls.
    least_work: called with the arguments of a call by name, defaults filled in, of which it names
        those that it reads; returns the cost of the call. `cost` calls it.
    has_gradient: whether autograd follows the op, by the gradient of its reference.
    writes: the names of the arguments that the op writes into; no gradient flows through those.
    computed_by: "oxytorch", whose kernels exist at every level, or "onednn" inside torch.
    autocast: what becomes of the arguments under `torch.autocast`.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.dtype, str], Iterable[Sample]]
    least_work: Callable[..., Cost]
    has_gradient: bool = True
    writes: tuple[str, ...] = ()
    computed_by: str = "oxytorch"
    autocast: Autocast = AS_GIVEN

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def arguments(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """All arguments of a call by name, defaults filled in, in the order of the signature."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def cost(self, *args: object, **kwargs: object) -> Cost:
        """The least work of a call with these arguments."""
        return self.least_work(**self.arguments(*args, **kwargs))


_registry: dict[str, Op] = {}


def registered(computed_by: str) -> dict[str, Op]:
    """The ops whose modules are imported and that this library computes, in name order."""
    return {name: op for name, op in sorted(_registry.items()) if op.computed_by == computed_by}


def register(
    function: Callable[..., Any],
    samples: Callable[[torch.dtype, str], Iterable[Sample]],
    cost: Callable[..., Cost],
    *,
    has_gradient: bool = True,
    writes: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
    autocast: Autocast = AS_GIVEN,
) -> Op:
    """Adds an op that `with_kernel` made, connects it with the dispatcher, and returns its record.

    writes: the arguments that an op writes into, which `with_writing_kernel` made; it has no
        gradient.
    fake: for such an op: returns empty tensors like its results, reading no data and writing none.
    autocast: what torch does with the arguments of operators like this one.
    """
    has_gradient = has_gradient and not writes
    op = Op(
        function, inspect.unwrap(function), samples, cost, has_gradient, writes, autocast=autocast
    )
    _added(op)
    _binding.bind(op.name, op.reference, has_gradient, fake, autocast)
    return op


def register_onednn(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: Callable[[torch.dtype, str], Iterable[Sample]],
    cost: Callable[..., Cost],
) -> Op:
    """Adds an op that oneDNN inside torch computes, with a packed weight, and returns its record.

    reference: called with all arguments by name; takes packed weights and multiplies plain values.
    """
    op = Op(function, reference, samples, cost, has_gradient=False, computed_by="onednn")
    return _added(op)


def _added(op: Op) -> Op:
    if op.name in _registry:
        raise ValueError(f"{op.name}: registered twice")
    _registry[op.name] = op
    return op
