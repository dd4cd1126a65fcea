"""A program that is called as the model was: nested arguments in, nested results out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import conditions
from .conditions import Condition
from .program import Program
from .structure import Structure

_MOST_SIZES = 1000


@dataclass(frozen=True)
class TensorInput:
    """A tensor of this dtype; shape has None where sizes may vary within the conditions."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class SizeInput:
    """An integer that may vary within the conditions."""

    name: str


@dataclass(frozen=True)
class FixedInput:
    """An argument that is always this number, text or None."""

    name: str
    value: bool | int | float | str | None


Input = TensorInput | SizeInput | FixedInput


@dataclass(frozen=True)
class Output:
    """Where a result comes from.

    kind: "tensor" or "size" (of the program's, by number), "input" (by its place among the
    inputs), "state" (by its place) or "fixed" (a value).
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Write:
    """A tensor of the program's that is written to "input" or "state", by its place."""

    kind: str
    place: int
    tensor: int


@dataclass(frozen=True)
class Interface:
    """How a model is called.

    arguments: of (args, kwargs), with one leaf for each input.
    results: with one leaf for each output.
    conditions: what must hold of sizes.
    """

    arguments: Structure
    inputs: tuple[Input, ...]
    results: Structure
    outputs: tuple[Output, ...]
    writes: tuple[Write, ...]
    conditions: tuple[Condition, ...]


@dataclass(repr=False)
class ProgramModel:
    """A model as a program. `oxytorch.optimize` makes one of an exported program.

    Call it as the module that was exported. It computes no gradients. str() gives the program.

    state: buffers that a call writes to, the program's first inputs.
    names: of the program's constants and then of the state.
    make_storable: where some weights are in oneDNN's order, which only this process can have, makes
        the program without, and gives the names of its constants.
    """

    program: Program
    interface: Interface
    state: list[Tensor] = field(default_factory=list)
    names: tuple[str, ...] = ()
    make_storable: Callable[[], tuple[Program, tuple[str, ...]]] | None = None
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError or ValueError where the arguments are others than those exported."""
        leaves = self._leaves(args, kwargs)
        tensors, sizes = self._checked(leaves)
        is_cast = torch.is_autocast_enabled("cpu")
        with torch.no_grad(), torch.autocast("cpu", enabled=False) if is_cast else nullcontext():
            made, numbers = self.program([*self.state, *tensors], sizes)
            places = {"input": leaves, "state": self.state, "tensor": made, "size": numbers}
            for write in self.interface.writes:
                places[write.kind][write.place].copy_(made[write.tensor])
        found = (
            output.value if output.kind == "fixed" else places[output.kind][output.value]
            for output in self.interface.outputs
        )
        return self.interface.results.build(found)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        positional, named = self.interface.arguments.parts
        try:
            if len(args) != len(positional.parts):
                also = f" and the keyword arguments {[*kwargs]}" if kwargs else ""
                wanted = f" and the keyword arguments {[*named.keys]}" if named.keys else ""
                raise TypeError(
                    f"expected {len(positional.parts)} positional arguments{wanted}, got "
                    f"{len(args)}{also}; {_AS_THE_EXAMPLE}"
                )
            if {*kwargs} != {*named.keys}:
                raise TypeError(
                    f"expected the keyword arguments {[*named.keys]}, got {[*kwargs]}; "
                    f"{_AS_THE_EXAMPLE}"
                )
            leaves: list[Any] = []
            first = 0
            given = [*args, *(kwargs[key] for key in named.keys)]
            for part, value in zip((*positional.parts, *named.parts), given, strict=True):
                name = self._root(first) if part.count() else "an argument"
                leaves.extend(part.take_apart(value, name))
                first += part.count()
        except TypeError as error:
            raise TypeError(f"program: {error}") from None
        return leaves

    def _root(self, place: int) -> str:
        """The name of the argument that an input is in."""
        return re.split(r"[.\[]", self.interface.inputs[place].name)[0]

    def _checked(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
        """Tensors and sizes of a call. Raises TypeError or ValueError if they do not fit."""
        tensors: list[Tensor] = []
        sizes: list[int] = []
        shapes: list[Any] = []
        for expected, value in zip(self.interface.inputs, leaves, strict=True):
            if isinstance(expected, TensorInput):
                self._check_tensor(expected, value)
                tensors.append(value)
                shapes.append(tuple(value.shape))
            elif isinstance(expected, SizeInput):
                if type(value) is not int:
                    raise TypeError(
                        f"program: expected {expected.name} to be an int, got a "
                        f"{type(value).__name__}"
                    )
                sizes.append(value)
                shapes.append(value)
            else:
                self._check_fixed(expected, value)
                shapes.append(None)
        self._check_sizes(tuple(shapes))
        return tensors, sizes

    def _check_tensor(self, expected: TensorInput, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"program: expected {expected.name} to be a tensor, got a {type(value).__name__}"
            )
        is_strided = value.layout is torch.strided
        if value.dtype is not expected.dtype or not value.is_cpu or not is_strided:
            found = (value.dtype, value.device.type, value.layout)
            raise TypeError(
                f"program: expected {expected.name} to be a {expected.dtype} cpu strided tensor, "
                f"got a {' '.join(map(str, found)).replace(' torch.', ' ')} one"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"program: expected {expected.name} without requires_grad, because a program "
                "computes no gradients; call it in torch.no_grad()"
            )

    def _check_fixed(self, expected: FixedInput, value: Any) -> None:
        own = expected.value
        is_nan = own != own and value != value
        if type(value) is not type(own) or (value != own and not is_nan):
            raise ValueError(
                f"program: expected {expected.name} to be {own!r}, with which the model was "
                f"exported, got {_shown(value)}"
            )

    def _check_sizes(self, shapes: tuple[Any, ...]) -> None:
        if shapes in self._seen:
            return
        for expected, shape in zip(self.interface.inputs, shapes, strict=True):
            if isinstance(expected, TensorInput):
                wanted = expected.shape
                if len(wanted) != len(shape) or any(
                    own not in (None, size) for own, size in zip(wanted, shape, strict=True)
                ):
                    shown = ", ".join("any" if size is None else str(size) for size in wanted)
                    raise ValueError(
                        f"program: expected {expected.name} of shape [{shown}], got {[*shape]}; "
                        "export or save the model with dynamic_shapes to have other sizes"
                    )
        names = [each.name for each in self.interface.inputs]
        for condition in self.interface.conditions:
            if not conditions.holds(condition, shapes):
                raise ValueError(
                    f"program: expected sizes with {conditions.text(condition, names)}, as the "
                    f"model was exported, got {_shapes(names, shapes)}"
                )
        if len(self._seen) < _MOST_SIZES:
            self._seen.add(shapes)

    def storable(self) -> ProgramModel:
        """The same model with plain tensors alone, which files and pickles can hold."""
        if self.make_storable is None:
            return self
        program, names = self.make_storable()
        names += self.names[len(self.program.constants) :]
        return ProgramModel(program, self.interface, self.state, names)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.storable())

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramModel:
        if self.make_storable is None:
            program, state = copy.deepcopy((self.program, self.state), memo)
        else:  # torch does not copy weights in oneDNN's order, which nobody writes to
            program, state = self.program, copy.deepcopy(self.state, memo)
        return ProgramModel(program, self.interface, state, self.names, self.make_storable)

    def __str__(self) -> str:
        return self.program.text

    def __repr__(self) -> str:
        names = ", ".join(each.name for each in self.interface.inputs)
        steps = self.program.text.partition("\noutputs")[0].count("\n")
        return f"ProgramModel({names}; {steps} steps)"


_AS_THE_EXAMPLE = (
    "pass arguments by position or by keyword as in the example that the model was exported with"
)


def _shown(value: Any) -> str:
    return f"a tensor of {[*value.shape]}" if isinstance(value, Tensor) else repr(value)[:100]


def _shapes(names: Sequence[str], shapes: Sequence[Any]) -> str:
    shown = [
        f"{name} of {[*shape]}" if isinstance(shape, tuple) else f"{name} = {shape}"
        for name, shape in zip(names, shapes, strict=True)
        if shape is not None
    ]
    return ", ".join(shown)
