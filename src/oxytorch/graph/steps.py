"""What the record of a run consists of: calls of modules, and the steps that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .code import is_constant


@dataclass(frozen=True)
class RecordedValue:
    """Stands for a tensor: the number of the step that made it and its place among the results."""

    number: int


@dataclass(frozen=True)
class Held:
    """Stands for a parameter or buffer: where a module keeps it."""

    module: nn.Module
    name: str

    def read(self) -> Tensor | None:
        found = self.module._parameters.get(self.name)
        return self.module._buffers.get(self.name) if found is None else found


@dataclass(frozen=True)
class Other:
    """Stands for an object that is no tensor and no constant (a cache, say)."""

    number: int


@dataclass
class RecordedStep:
    """One call of a function, or of a module that is called as a whole.

    arguments: (args, kwargs) and result, with Values in place of tensors.
    call: the number of the module call whose code made it.
    writes: the memory (storage) that it wrote to.
    """

    target: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    call: int
    writes: frozenset[int] = frozenset()
    storages: dict[int, int] = field(default_factory=dict)


@dataclass
class RecordedCall:
    """One call of a module: its arguments, its output, and the steps [begin, end) below it.

    arguments and output are those of its code.

    outer, outer_output: what the caller gave and got, where hooks lie between.
    parent: the number of the call that it happened in, -1 for the first.
    refusal: why the module's own code must not be passed over, if so.
    reads_shapes, reads_kinds: whether its code looks at sizes, or at dtypes and the like.
    given: the arguments themselves.
    globals: the names of the global variables that its code reads; methods: (module, name) of what
        it finds in a class.
    settings: (object, name) of what it reads in attributes of modules.
    """

    module: nn.Module
    parent: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    begin: int
    outer: tuple[tuple[Any, ...], dict[str, Any]]
    end: int = -1
    output: Any = None
    outer_output: Any = None
    refusal: str | None = None
    reads_shapes: bool = False
    reads_kinds: bool = False
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    globals: dict[tuple[str, str], None] = field(default_factory=dict)
    methods: dict[tuple[nn.Module, str], None] = field(default_factory=dict)
    settings: list[tuple[Any, str]] = field(default_factory=list)


def is_same(first: RecordedStep, second: RecordedStep) -> bool:
    """Whether two steps call one function on the same values, from the same call."""
    if first.target != second.target or first.call != second.call:
        return False
    ours, theirs = (pytree.tree_flatten((step.arguments, step.result)) for step in (first, second))
    return ours[1] == theirs[1] and all(
        type(a) is type(b) and (a is b or not is_constant(a) or a == b or a != a)
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
