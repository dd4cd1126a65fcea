"""A program: operator calls over numbered values, as text that the library reads and runs.

    inputs 2 1 1
    %3 = aten::linear %0 %1 some %2
    $1 = size %3 -1
    outputs %3 $1

The first line gives the numbers of input tensors, input sizes and constants. Tensors are `%0`, `%1`
and so on: inputs, then constants, then results in the order in which they are made. Sizes, which
are integers, are `$0`, `$1` and so on. Each further line is a step; the last one names the outputs.
Lines behind it are the plan of its memory (plan.py): `place %7 0 3072*%0.1` says that %7 lies in
buffer 0 of the arena, and takes 3072 bytes for each element of dimension 1 of input 0.
Steps call operators of torch or of this package by name with all arguments of their schemas, or do
one of four things of our own: `size` of a tensor, arithmetic on sizes, `add` with a factor, and
`require`, which ends the program unless a tensor holds the same bits as a constant.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .plan import ArenaPlan, planned

Argument = Any
"""A `Value`, a word (str), `Some`, or a list of arguments."""


@dataclass(eq=False)
class Value:
    """A tensor, or a size, of a program.

    meta: a tensor without values that tells the shape, strides and dtype, where they are known.
    """

    is_size: bool = False
    meta: Tensor | None = None


@dataclass(frozen=True)
class Some:
    """An optional argument that is given."""

    item: Argument


@dataclass(frozen=True, eq=False)
class Step:
    """One call.

    target: the operator, with its overload after a dot.
    results: None where nobody takes one.
    returns_list: whether the operator returns one list of tensors, which are the results.
    has_effect: whether it writes to a tensor or draws random numbers.
    is_view: whether a result may share memory with an argument. Its lists are not written to.
    """

    target: str
    arguments: Sequence[Argument]
    results: Sequence[Value | None]
    returns_list: bool = False
    has_effect: bool = False
    is_view: bool = False

    @cached_property
    def taken(self) -> tuple[Value, ...]:
        """The values among the arguments, in order."""
        return (*values_of(self.arguments),)

    def with_arguments(self, arguments: Sequence[Argument]) -> Step:
        """The same call with other arguments."""
        return replace(self, arguments=arguments)


@dataclass
class Steps:
    """A program that is being written: values in place of numbers."""

    inputs: list[Value] = field(default_factory=list)
    constants: dict[Value, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    @property
    def has_effect(self) -> bool:
        """Whether a step does more than to make results."""
        return any(step.has_effect for step in self.steps)

    def copy(self) -> Steps:
        """The same steps in lists of their own."""
        return Steps([*self.inputs], {**self.constants}, [*self.steps], [*self.outputs])

    def drop_unused(self) -> None:
        """Drop the steps and constants that nobody takes a result of."""
        used: set[Value | None] = {*self.outputs}
        kept: list[Step] = []
        for step in reversed(self.steps):
            if step.has_effect or not used.isdisjoint(step.results):
                kept.append(step)
                used.update(step.taken)
        self.steps = kept[::-1]
        self.constants = {v: tensor for v, tensor in self.constants.items() if v in used}

    def text(self) -> str:
        """The program as text."""
        return _Writer(self).text()

    def program(self) -> Program:
        """The program as text, loaded. Raises RuntimeError for a step that is no call of its
        operator."""
        return Program(self.text(), [*self.constants.values()])


def values_of(argument: Argument) -> Iterator[Value]:
    """The values in an argument, or in a list of arguments."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Some):
        yield from values_of(argument.item)
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from values_of(item)


class _Writer:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._words: dict[Value, str] = {}
        self._counts = {False: 0, True: 0}

    def text(self) -> str:
        steps = self._steps
        for value in (*steps.inputs, *steps.constants):
            self._number(value)
        counts = [sum(value.is_size is kind for value in steps.inputs) for kind in (False, True)]
        lines = [f"inputs {counts[0]} {counts[1]} {len(steps.constants)}"]
        lines += [self._line(step) for step in steps.steps]
        lines.append(" ".join(["outputs", *map(self._word, steps.outputs)]))
        numbers = {v: int(word[1:]) for v, word in self._words.items() if not v.is_size}
        lines += map(str, planned(steps, numbers).places)
        return "\n".join(lines)

    def _number(self, value: Value) -> str:
        sigil = "$" if value.is_size else "%"
        word = self._words[value] = f"{sigil}{self._counts[value.is_size]}"
        self._counts[value.is_size] += 1
        return word

    def _line(self, step: Step) -> str:
        if "::" in step.target:
            _check_call(step)
        arguments = [self._word(argument) for argument in step.arguments]
        results = ["_" if value is None else self._number(value) for value in step.results]
        if step.returns_list:
            results = ["[", *results, "]"]
        return " ".join([*results, "=", step.target, *arguments])

    def _word(self, argument: Argument) -> str:
        if isinstance(argument, Value):
            return self._words[argument]
        if isinstance(argument, Some):
            return f"some {self._word(argument.item)}"
        if isinstance(argument, list):
            return " ".join(["[", *map(self._word, argument), "]"])
        return str(argument)


class _Signature(NamedTuple):
    """What an operator takes and returns: the kinds of its arguments, those that hold others
    first."""

    arguments: tuple[tuple[str, ...], ...]
    results: int
    returns_list: bool


_WORDS = frozenset(
    f"{name}Type"
    for name in (
        "Float", "Bool", "String", "ScalarType", "Layout", "MemoryFormat", "DeviceObj",
    )
)  # fmt: skip
"""The kinds of arguments that are words."""
_SIZES = frozenset(("IntType", "SymIntType"))


@cache
def _signature(target: str) -> _Signature:
    """The signature of a step's operator. Raises RuntimeError where torch knows none."""
    name, _, overload = target.partition(".")
    torch._C._dispatch_find_schema_or_throw(name, overload)  # which some others are known without
    schema: Any = torch._C._get_schema(name, overload)
    kinds = tuple((*_kinds(each.real_type),) for each in schema.arguments)
    returned = [each.type.kind() for each in schema.returns]
    return _Signature(kinds, len(returned), returned == ["ListType"])


def _kinds(kind: Any) -> Iterator[str]:
    while kind.kind() in ("OptionalType", "ListType"):
        yield kind.kind()
        kind = kind.getElementType()
    yield kind.kind()


def _check_call(step: Step) -> None:
    """Raise RuntimeError for a step that is no call of its operator: the library, which calls by
    name, would take numbers for tensors."""
    own = _signature(step.target)
    if step.returns_list != own.returns_list:
        raise RuntimeError(f"{step.target}: it returns {'a list' if own.returns_list else 'none'}")
    if not own.returns_list and len(step.results) != own.results:
        raise RuntimeError(
            f"{step.target}: expected {own.results} results, got {len(step.results)}"
        )
    if len(step.arguments) != len(own.arguments):
        raise RuntimeError(
            f"{step.target}: expected {len(own.arguments)} arguments, got {len(step.arguments)}"
        )
    for place, (given, kinds) in enumerate(zip(step.arguments, own.arguments, strict=True)):
        if not _is_of(given, kinds):
            raise RuntimeError(
                f"{step.target}: expected argument {place} of {' of '.join(kinds)}, got {given!r}"
            )


def _is_of(given: Argument, kinds: Sequence[str]) -> bool:
    """Whether an argument is of a kind that the library passes."""
    kind = kinds[0]
    if kind == "OptionalType":
        return given == "none" or (isinstance(given, Some) and _is_of(given.item, kinds[1:]))
    if kind == "ListType":
        return isinstance(given, list) and all(_is_of(each, kinds[1:]) for each in given)
    if isinstance(given, Value):
        return kind in _SIZES if given.is_size else kind == "TensorType"
    return isinstance(given, str) and (kind in _SIZES or kind in _WORDS)


class UnmetError(Exception):
    """A value is another one than a program requires."""


class Memory(NamedTuple):
    """Bytes that a call of a program used.

    arena: of its arena, in which results lie one after the other in the same places.
    results: of all that lay there, those that our operators make and later steps use up. Both are 0
        where none did: before the first call, and where results are small or torch's operators make
        them.
    """

    arena: int
    results: int


def free_memory() -> int:
    """Give the system the arenas that programs keep between calls; return how many bytes.

    The next calls take them again, and wait for their pages once.
    """
    return int(_library.functions().oxytorch_free_arenas()) if _library.loaded else 0


class Program:
    """A list of operator calls, checked and translated by the library.

    text: see above.
    constants: the tensors that it names after its inputs.

    What its steps use up among themselves lies in an arena (see `Memory`), one for each call in
    flight, which is kept for the next call of any program. It goes when a program is freed that
    used one, or by `free_memory`. str() gives the text, and what the last call used.

    Raises RuntimeError if the text is no program.
    """

    def __init__(self, text: str, constants: Sequence[Tensor]) -> None:
        if not _library.loaded:
            raise RuntimeError(f"a program needs the compiled library: {_library.why_missing}")
        self.text, self.constants = text, [*constants]
        self._address: int = torch.ops.oxytorch.load_program(text, self.constants)
        forget = _library.functions().oxytorch_forget_program
        weakref.finalize(self, forget, ctypes.c_void_p(self._address))

    def __call__(
        self, tensors: Sequence[Tensor], sizes: Sequence[int] = (), is_unseen: bool = False
    ) -> tuple[list[Tensor], list[int]]:
        """Run on input tensors and sizes; return the output tensors and sizes.

        is_unseen: nobody can tell how results are computed (see `core.modes.is_unseen`), and the
        tensors have no signs that are turned when they are read (`Tensor.is_neg`): our operators
        are then called, and views made, without torch's dispatcher.

        Raises UnmetError where a value is another one than a step requires.
        """
        holds, found, numbers = torch.ops.oxytorch.run_program(
            self._address, tensors, sizes, is_unseen
        )
        if not holds:
            raise UnmetError
        return found, numbers

    def memory(self) -> Memory:
        """What the last call used, of those that ended."""
        found = (ctypes.c_int64 * 2)()
        _library.functions().oxytorch_program_memory(ctypes.c_void_p(self._address), found)
        return Memory(*found)

    @property
    def plan(self) -> ArenaPlan:
        """Where its results lie in the arena, as formulas of the sizes of inputs."""
        return ArenaPlan.of_text(self.text)

    def __str__(self) -> str:
        arena, results = self.memory()
        used = f"\n# last call: {results} bytes of results in an arena of {arena}"
        return self.text + used if results else self.text

    def __reduce__(self) -> Any:
        return Program, (self.text, self.constants)
