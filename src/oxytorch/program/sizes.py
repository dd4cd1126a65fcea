"""Recorded runs that differ in sizes alone, as one run with formulas of the sizes of its inputs.

Code computes with the sizes of its inputs, so that a recorded run holds numbers that depend on
them. Of runs on inputs of other sizes that take the same steps, each number that differs becomes
the simplest formula that gives it in all of them. That it gives the numbers of a further run is
never assumed: the run is recorded, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from . import conditions
from .calls import Form, OperatorCall, Recording, TensorRef, form_of, is_equal, is_same

MOST_FACTORS = 2
"""Sizes that a formula multiplies, such as the batch size and the length."""


class DifferentError(Exception):
    """Runs that differ in more than sizes; the text says in what, if that is known."""

    def __str__(self) -> str:
        return super().__str__() or "results differ in more than formulas of the sizes"


@dataclass(frozen=True)
class Formula:
    """factor * the product of some sizes + rest; sizes: their numbers."""

    factor: int
    sizes: tuple[int, ...]
    rest: int

    def of(self, values: Sequence[Any]) -> Any:
        """Its value, where the sizes have these."""
        return self.factor * math.prod(values[number] for number in self.sizes) + self.rest


class SizedRun:
    """Several recorded runs as one.

    runs: at least two.
    inputs: for each of them the forms of its inputs, of which the first `count` are those of the
        call; the rest are the same at each call.

    places: for each size the number of an input and a dimension of it.
    recording, inputs: those of the runs, with formulas in place of numbers that differ.

    Raises DifferentError.
    """

    def __init__(
        self, runs: Sequence[Recording], inputs: Sequence[tuple[Form, ...]], count: int
    ) -> None:
        self._count = count
        self._groups = _groups([own[:count] for own in inputs])
        self._known = [*zip(*self._groups, strict=True)]  # for each run, the values of the sizes
        self.places = [places[0] for places in self._groups.values()]
        self.inputs: tuple[Form, ...] = self._one(inputs)
        first = runs[0]
        steps = [self._step(own) for own in _together([run.steps for run in runs])]
        keys = [*first.forms]
        if any([*run.forms] != keys or run.outputs != first.outputs for run in runs):
            raise DifferentError("it returns other tensors")
        forms = {key: self._one([_plain(run.forms[key]) for run in runs]) for key in keys}
        self.recording = replace(first, steps=steps, forms=forms)

    def _step(self, steps: tuple[OperatorCall, ...]) -> OperatorCall:
        first = steps[0]
        others = {
            str(step.operator): None for step in steps if not differ_in_arguments(step, first)
        }
        if others:
            raise DifferentError(
                f"it calls {first.operator} of one size, {next(iter(others))} of another"
            )
        try:
            return replace(first, arguments=self._one([step.arguments for step in steps]))
        except DifferentError:
            message = f"an argument of {first.operator} is no formula of the sizes"
            raise DifferentError(message) from None

    def _one(self, values: Sequence[Any]) -> Any:
        """What stands for a value of each run."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise DifferentError
        if isinstance(first, tuple):
            if any(len(value) != len(first) for value in values):
                raise DifferentError
            parts = [self._one(each) for each in zip(*values, strict=True)]
            return type(first)(*parts) if isinstance(first, Form) else tuple(parts)
        if all(is_equal(value, first) for value in values):
            return first
        if type(first) is not int:
            raise DifferentError
        return self._formula(values)

    def _formula(self, values: Sequence[int]) -> Formula:
        """The simplest formula that gives these numbers in the runs."""
        numbers = range(len(self.places))
        products = [
            sizes
            for factors in range(1, MOST_FACTORS + 1)
            for sizes in combinations_with_replacement(numbers, factors)
        ]
        found = [f for f in (self._line(sizes, values) for sizes in products) if f is not None]
        if not found:
            raise DifferentError
        return min(found, key=lambda f: (f.rest != 0, len(f.sizes), abs(f.factor), abs(f.rest)))

    def _line(self, sizes: tuple[int, ...], values: Sequence[int]) -> Formula | None:
        """factor * product + rest of these sizes, if it gives the numbers."""
        products = [math.prod(known[number] for number in sizes) for known in self._known]
        ends = next((p for p in range(1, len(products)) if products[p] != products[0]), None)
        if ends is None:
            return None
        factor, left = divmod(values[ends] - values[0], products[ends] - products[0])
        formula = Formula(factor, sizes, values[0] - factor * products[0])
        gives = all(formula.of(k) == v for k, v in zip(self._known, values, strict=True))
        return formula if factor and not left and gives else None

    def sizes_of(self, inputs: Sequence[Form]) -> list[int] | None:
        """The sizes of a call's inputs; None where sizes differ that are one here, or there are
        more or fewer inputs."""
        if len(inputs) != self._count:
            return None
        found: list[int] = []
        for places in self._groups.values():
            values = {_extent(inputs[number].shape, dim) for number, dim in places}
            if len(values) != 1 or None in values:
                return None
            found += values  # type: ignore[arg-type]
        return found

    def outputs(self, sizes: Sequence[int]) -> list[tuple[Any, ...]]:
        """The shapes, strides and dtypes of its outputs, where the sizes have these values."""
        forms = [self._form(value) for value in self.recording.outputs]
        return [(_of(form.shape, sizes), _of(form.stride, sizes), form.dtype) for form in forms]

    def _form(self, value: TensorRef) -> Form:
        if value.kind == "result":
            return self.recording.forms[value]
        if value.kind == "external":
            return form_of(self.recording.externals[value.number])
        return self.inputs[value.number]

    def takes(self, inputs: Sequence[Form], sizes: Sequence[int]) -> bool:
        """Whether inputs have the forms of these, where the sizes have these values."""
        return _agrees(self.inputs[: self._count], tuple(inputs), sizes)

    def is_of(self, run: Recording, inputs: Sequence[Form], sizes: Sequence[int]) -> bool:
        """Whether it is this run, where the sizes have these values."""
        own = self.recording
        return (
            len(run.steps) == len(own.steps)
            and [*run.forms] == [*own.forms]
            and run.outputs == own.outputs
            and _agrees(self.inputs, tuple(inputs), sizes)
            and all(
                differ_in_arguments(a, b) and _agrees(a.arguments, b.arguments, sizes)
                for a, b in zip(own.steps, run.steps, strict=True)
            )
            and all(_agrees(own.forms[key], _plain(run.forms[key]), sizes) for key in own.forms)
        )


def _plain(form: Form) -> Form:
    """A form, whichever memory the tensor has."""
    return form._replace(memory=0)


def _extent(shape: Sequence[int], dim: int) -> int | None:
    return shape[dim] if dim < len(shape) else None


def _groups(runs: Sequence[tuple[Form, ...]]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """The sizes that differ between runs, by their values in these, with the places that have them.

    Raises DifferentError where no size differs, one is 1 in some runs, or inputs differ in more.
    """
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, forms in enumerate(_together(runs)):
        if len({len(form.shape) for form in forms}) != 1:
            raise DifferentError("its inputs have other numbers of dimensions")
        for dim, values in enumerate(zip(*(form.shape for form in forms), strict=True)):
            if len({*values}) > 1:
                if min(values) <= 1:  # of which steps, orders in memory and broadcasts differ
                    raise DifferentError("a size is 1")
                found.setdefault(values, []).append((number, dim))
    if not found:
        raise DifferentError("its inputs differ in more than sizes")
    return found


def _together(runs: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """The first of each run, the second of each, and so on. Raises DifferentError."""
    counts = [*{len(run): None for run in runs}]
    if len(counts) != 1:
        raise DifferentError(f"it calls {counts[0]} operators of one size, {counts[1]} of another")
    return zip(*runs, strict=True)


def differ_in_arguments(a: OperatorCall, b: OperatorCall) -> bool:
    """Whether two steps differ in arguments alone, if at all."""
    return _fixed(a) == _fixed(b)


def _fixed(step: OperatorCall) -> tuple[Any, ...]:
    return step.operator, step.results, type(step.read), repr(step.read)


def share_externals(first: Recording, second: Recording) -> bool:
    """Whether two runs take the same tensors from outside, or constants of the same values."""
    return len(first.externals) == len(second.externals) and all(
        one is other or (number in first.literals and is_same(one, other))
        for number, (one, other) in enumerate(zip(first.externals, second.externals, strict=True))
    )


def _of(numbers: Sequence[Any], sizes: Sequence[int]) -> tuple[int, ...]:
    """Numbers, which may be formulas, where the sizes have these values."""
    return tuple([n.of(sizes) if isinstance(n, Formula) else n for n in numbers])


def _agrees(own: Any, value: Any, sizes: Sequence[int]) -> bool:
    """Whether a value is what stands for it, where the sizes have these values."""
    if isinstance(own, Formula):
        return type(value) is int and own.of(sizes) == value
    if isinstance(own, tuple):
        pairs = type(value) is type(own) and len(value) == len(own)
        return pairs and all(_agrees(a, b, sizes) for a, b in zip(own, value, strict=True))
    return is_equal(own, value)


class Symbols:
    """Sizes as symbols, by which passes tell what holds for all of them.

    values: those of a run that a program is made of.
    """

    def __init__(self, values: Sequence[int]) -> None:
        # Which torch takes a second to import.
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self._symbols, self.sizes = [], []
        self._conditions: list[conditions.Condition] = []
        self._counted = 0  # guards that these are of
        for number, value in enumerate(values):
            source = ConstantSource(f"size_{number}")
            symbol = self._env.create_symbol(
                value, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self._symbols.append(symbol)
            self.sizes.append(self._env.create_symintnode(symbol, hint=value, source=source))

    def mode(self) -> Any:
        """A mode under which operators compute forms, with symbols for sizes, and no values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)
        mode.cache_enabled = False  # what it keeps does not tell what was asked of sizes
        return mode

    def tensor(self, form: Form) -> Tensor:
        """A tensor of a form, under `mode`."""
        shape, stride = ([self.value(each) for each in own] for own in (form.shape, form.stride))
        return torch.empty_strided(shape, stride, dtype=form.dtype, device="cpu")

    def meta(self, form: Form) -> Tensor:
        """A tensor of a form, without values."""
        shape, stride = ([self.value(each) for each in own] for own in (form.shape, form.stride))
        return torch.empty_strided(shape, stride, dtype=form.dtype, device="meta")

    def value(self, number: Any) -> Any:
        """A number, which may be a formula of the sizes."""
        return number.of(self.sizes) if isinstance(number, Formula) else number

    def agree(self, own: Any, value: Any) -> bool:
        """Whether a value of a run on symbols is what stands for it, whatever the sizes are."""
        if isinstance(own, tuple):
            pairs = type(value) is type(own) and len(value) == len(own)
            return pairs and all(map(self.agree, own, value))
        if isinstance(own, Formula) or isinstance(value, torch.SymInt):
            is_number = isinstance(own, Formula | int) and type(value) in (int, torch.SymInt)
            difference = _expression(self.value(own)) - _expression(value) if is_number else None
            return difference is not None and difference.expand() == 0
        return is_equal(own, value)

    def conditions(self) -> list[conditions.Condition]:
        """What has to hold for sizes above 1, numbered as inputs that are numbers, for what was
        found to hold for the symbols. Raises ValueError where it is no arithmetic."""
        from torch.utils._sympy.printers import PythonPrinter

        guards = self._env.guards
        if len(guards) != self._counted:
            names = {str(symbol): ["value", n] for n, symbol in enumerate(self._symbols)}
            texts = dict.fromkeys(PythonPrinter().doprint(guard.expr) for guard in guards)
            found = [conditions.parse(text, names) for text in texts]
            self._conditions = [each for each in found if not _always_holds(each)]
            self._counted = len(guards)
        return self._conditions

    def texts(self, places: Sequence[tuple[int, int]]) -> list[str]:
        """The same as Python. places: for each size the number of an input and a dimension of it.
        Raises ValueError as `conditions` does."""
        names = [f"input_{number}.shape[{dim}]" for number, dim in places]
        return [conditions.text(each, names) for each in self.conditions()]

    def allow(self, values: Sequence[int]) -> bool:
        """Whether what was found to hold for the symbols holds for these sizes."""
        if min(values) <= 1:
            return False
        try:
            return all(conditions.holds(each, values) for each in self.conditions())
        except ValueError:
            return False


def _always_holds(condition: Any) -> bool:
    """Whether a condition says no more than that a size, or a product of some, is above 1."""
    name, *operands = condition if isinstance(condition, list) else ("", 0, 0)
    least = {"!=": (0, 1), ">=": (0, 1, 2), ">": (0, 1)}.get(name, ())
    return operands[1:] in [[n] for n in least] and _is_product(operands[0])


def _is_product(condition: Any) -> bool:
    if not isinstance(condition, list):
        return type(condition) is int and condition >= 1
    name, *operands = condition
    return name == "value" or (name == "*" and all(map(_is_product, operands)))


def _expression(number: Any) -> Any:
    """A number as sympy has it."""
    import sympy  # type: ignore[import-untyped]

    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)
