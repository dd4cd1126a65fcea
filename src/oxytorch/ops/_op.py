"""The record of an op: everything that tests, benchmarks, documentation and passes read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._binding import bind


@dataclass(frozen=True)
class Sample:
    """One call of an op: its arguments, and a name for the test's id such as `3x7`."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The least work of one call.

    bytes: each input read once, each output written once. operations: arithmetic operations.
    """

    bytes: int
    operations: int


@dataclass(frozen=True)
class Op:
    """A mathematical operation with a public function and a reference in plain PyTorch.

    function: the public typed function; its name is the op's name, folder, schema and test id.
    reference: plain PyTorch with the same signature; also runs in float64.
    samples: called with a dtype and a size ("test", "cache" or "memory"), yields calls.
    cost: called with a sample's arguments, returns the least work of that call.
    backward: called with the list of inputs, the tuple of output gradients and which inputs need
        one; returns one gradient per input. None means what torch finds for the reference.
    spellings: other ways in which models write the same formula.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.dtype, str], Iterable[Sample]]
    cost: Callable[..., Cost]
    backward: Callable[..., Any] | None = None
    spellings: tuple[Callable[..., Any], ...] = ()

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.function.__name__


_registry: dict[str, Op] = {}


def registered() -> dict[str, Op]:
    """The ops whose modules are imported, by name, in name order."""
    return dict(sorted(_registry.items()))


def register(op: Op, schema_reference: Callable[..., Any] | None = None) -> Op:
    """Adds `op` to the registry, connects it with its compiled kernel, and returns it.

    schema_reference: the reference with the results of the schema, where the public function's
    results differ from them.
    """
    if op.name in _registry:
        raise ValueError(f"{op.name}: registered twice")
    _registry[op.name] = op
    bind(op.name, schema_reference or op.reference, op.backward)
    return op
