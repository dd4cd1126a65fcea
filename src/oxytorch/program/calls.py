"""What a run of a module consists of: calls of operators, and tensors that they take and make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numbered import as_given


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor of a record: kind is "input", "external" (kept) or "result"."""

    kind: str
    number: int


class Form(NamedTuple):
    """How a tensor lies in memory, and in which."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    memory: int

    @property
    def is_dense(self) -> bool:
        """Whether it lies in the usual order, without gaps."""
        return self.meta().is_contiguous()

    def meta(self) -> Tensor:
        """A tensor of this form without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class OperatorCall:
    """One operator call: arguments in the order of the schema, tensors as Values.

    results: a Value, a list of Values or None for each result.
    read: the value that Python saw.
    """

    operator: Any
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    read: Any = None


def form_of(tensor: Tensor) -> Form:
    """The form of a plain tensor."""
    memory = tensor.untyped_storage()._cdata
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, memory)


@dataclass
class Recording:
    """What one run of a module did: its steps, the tensors from outside, its outputs.

    outputs: what stands for the tensors of the output; tensors: these; output: the output itself.
    forms: the shape, strides and dtype of each result.
    literals: which of the tensors from outside are made of Python values.
    made: the results themselves, while the run may be recorded again.
    """

    steps: list[OperatorCall]
    externals: list[Tensor]
    outputs: list[TensorRef]
    tensors: list[Tensor]
    output: Any
    forms: dict[TensorRef, Form]
    literals: set[int] = field(default_factory=set)
    made: dict[TensorRef, Tensor] = field(default_factory=dict)


def operators(recording: Recording) -> list[Any]:
    """The operators of a run, in order."""
    return [step.operator for step in recording.steps]


def in_order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema, defaults filled in."""
    rest = func._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, as_given(a.default_value, a)) for a in rest))


def as_given_to(func: Any, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in the order of the schema as positional and keyword ones."""
    pairs = [*zip(func._schema.arguments, arguments, strict=True)]
    return (
        tuple(value for argument, value in pairs if not argument.kwarg_only),
        {argument.name: value for argument, value in pairs if argument.kwarg_only},
    )


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one form and equal values."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def is_equal(first: Any, second: Any) -> bool:
    """Whether two values are of one type and equal. 0.0 and -0.0 are not, for an operator, and two
    values that are no number are."""
    if type(first) is not type(second):
        return False
    is_broken = isinstance(first, (float, complex))
    return repr(first) == repr(second) if is_broken else bool(first == second)


def values_in(nested: Any) -> Iterator[TensorRef]:
    """All Values among arguments or results, in order."""
    for item in nested:
        if isinstance(item, TensorRef):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from values_in(item)
