"""Recorded runs that differ in sizes alone, as one run with formulas of the sizes of its inputs.

Code computes with the sizes of its inputs, so that a recorded run holds numbers that depend on
them. Of runs on inputs of other sizes that take the same steps, each number that differs becomes
the simplest formula that gives it in all of them. That it gives the numbers of a further run is
never assumed: the run is recorded, and compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .calls import (
    Form,
    OperatorCall,
    Recording,
    TensorRef,
    as_given_to,
    form_of,
    is_equal,
    is_same,
    values_in,
)
from .sized import Formula, Rounded, Sized, size_of

MOST_FACTORS = 2
"""Sizes that a formula multiplies, such as the batch size and the length."""
MOST_STRIDE = 64
"""By how much an operator divides a size at most, such as a convolution with strides."""


class DifferentError(Exception):
    """Runs that differ in more than sizes; the text says in what, if that is known."""

    def __str__(self) -> str:
        return super().__str__() or "results differ in more than formulas of the sizes"


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
        self._fits: dict[tuple[tuple[int, ...], _Sizes], Formula | None] = {}
        self._rounded: list[Rounded] = []
        self.inputs: tuple[Form, ...] = self._one(inputs)
        self._look_for_rounded(runs, inputs)
        first, keys = runs[0], [*runs[0].forms]
        if any([*run.forms] != keys or run.outputs != first.outputs for run in runs):
            raise DifferentError("it returns other tensors")
        forms: dict[TensorRef, Form] = {}
        steps = []
        for own in _together([run.steps for run in runs]):
            among = self._sizes_taken(own[0], forms)
            steps.append(self._step(own, among))
            for key in values_in(own[0].results):
                if key in first.forms:
                    forms[key] = self._one_form([_plain(run.forms[key]) for run in runs], among)
        forms = {key: forms[key] for key in keys}
        self.recording = replace(first, steps=steps, forms=forms)

    def _sizes_taken(self, step: OperatorCall, forms: Mapping[TensorRef, Form]) -> _Sizes:
        """The sizes of the tensors that a step takes. forms: those of results so far."""
        found: set[int | Rounded] = set()
        for value in values_in(step.arguments):
            form = forms.get(value) if value.kind == "result" else None
            form = self.inputs[value.number] if value.kind == "input" else form
            found |= set() if form is None else _sizes_in(form.shape)
        return frozenset(found)

    def _step(self, steps: tuple[OperatorCall, ...], among: _Sizes) -> OperatorCall:
        first = steps[0]
        others = {
            str(step.operator): None for step in steps if not differ_in_arguments(step, first)
        }
        if others:
            raise DifferentError(
                f"it calls {first.operator} of one size, {next(iter(others))} of another"
            )
        try:
            return replace(first, arguments=self._one([step.arguments for step in steps], among))
        except DifferentError:
            message = f"an argument of {first.operator} is no formula of the sizes"
            raise DifferentError(message) from None

    def _one(self, values: Sequence[Any], among: _Sizes = frozenset()) -> Any:
        """What stands for a value of each run. among: the sizes that it is rather made of."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise DifferentError
        if isinstance(first, tuple):
            if any(len(value) != len(first) for value in values):
                raise DifferentError
            if isinstance(first, Form):
                return self._one_form(values, among)
            return tuple(self._one(each, among) for each in zip(*values, strict=True))
        if all(is_equal(value, first) for value in values):
            return first
        if type(first) is not int:
            raise DifferentError
        found = self._fit(tuple(values), among)
        if found is None:
            raise DifferentError
        return found

    def _one_form(self, forms: Sequence[Form], among: _Sizes) -> Form:
        """The same of forms, whose strides are products of their own sizes if they can be."""
        shapes, strides, *rest = zip(*forms, strict=True)
        shape = self._one(shapes, among)
        own = _sizes_in(shape)
        products = [*_products(sorted(own, key=repr))]

        def stride_of(values: tuple[int, ...]) -> Any:
            if len({*values}) > 1:
                lines = [self._line(factors, values) for factors in products]
                exact = [line for line in lines if line is not None and not line.rest]
                if exact:
                    return min(exact, key=lambda line: abs(line.factor))
            return self._one(values, frozenset(own))

        stride = tuple(map(stride_of, zip(*strides, strict=True)))
        return Form(shape, stride, *map(self._one, rest))

    def _fit(self, values: tuple[int, ...], among: _Sizes = frozenset()) -> Formula | None:
        """The simplest formula that gives these numbers in the runs, if there is one."""
        if (values, among) not in self._fits:
            sizes: list[int | Rounded] = [*range(len(self.places)), *self._rounded]
            lines = (self._line(factors, values) for factors in _products(sizes))
            key = partial(_complexity, among=among)
            self._fits[values, among] = min(filter(None, lines), key=key, default=None)
        return self._fits[values, among]

    def _line(self, sizes: tuple[int | Rounded, ...], values: Sequence[int]) -> Formula | None:
        """factor * product + rest of these sizes, if it gives the numbers."""
        products = [math.prod(size_of(each, known) for each in sizes) for known in self._known]
        ends = next((p for p in range(1, len(products)) if products[p] != products[0]), None)
        if ends is None:
            return None
        factor, left = divmod(values[ends] - values[0], products[ends] - products[0])
        formula = Formula(factor, sizes, values[0] - factor * products[0])
        gives = all(formula.of(k) == v for k, v in zip(self._known, values, strict=True))
        return formula if factor and not left and gives else None

    def _look_for_rounded(
        self, runs: Sequence[Recording], inputs: Sequence[tuple[Form, ...]]
    ) -> None:
        """Find the sizes of results that operators round down."""
        for steps in _together([run.steps for run in runs]):
            for place, key in enumerate(pytree.tree_leaves(steps[0].results)):
                forms = [run.forms.get(key) for run in runs] if key is not None else [None]
                shapes = [form.shape for form in forms if form is not None]
                if len(shapes) != len(runs) or len({*map(len, shapes)}) != 1:
                    continue
                for dim, values in enumerate(zip(*shapes, strict=True)):
                    fit = self._fit(values) if len({*values}) > 1 else None
                    if len({*values}) > 1 and (fit is None or fit.factor < 0 or fit.rest):
                        taken = [
                            _forms_of(steps[0], *each) for each in zip(runs, inputs, strict=True)
                        ]
                        found = self._rounded_of(steps[0], taken, (place, dim), values)
                        if found is None:
                            continue
                        if min(values) <= 1:
                            raise DifferentError("a size is 1")
                        self._rounded.append(found)
                        self._fits.clear()

    def _rounded_of(
        self,
        step: OperatorCall,
        taken: Sequence[dict[TensorRef, Form]],
        place: tuple[int, int],
        values: tuple[int, ...],
    ) -> Rounded | None:
        """What a step makes of a size of what it takes.

        taken: the forms of that, in each run.
        place: the number of the result and the dimension that has these values.
        """
        for key in taken[0]:
            shapes = [forms[key].shape for forms in taken]
            for dim, extents in enumerate(zip(*shapes, strict=True)):
                formula = self._fit(extents) if len({*extents}) > 1 else None
                if formula is None:
                    continue
                pairs = [*zip(extents, values, strict=True)]
                for divisor in range(1, MOST_STRIDE + 1):
                    if _rests(divisor, pairs):
                        probed = _probed(step, taken[0], (key, dim), place, max(divisor, 2))
                        rests = _rests(divisor, [*pairs, *probed])
                        if probed and rests:
                            return Rounded(formula, rests[0], divisor)
        return None

    def corrected(self, recording: Recording) -> SizedRun:
        """The same runs with other formulas, which a run on symbols computed."""
        found = copy.copy(self)
        found.recording = recording
        return found

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
        return None if any(each.of(found) <= 1 for each in self._rounded) else found

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


_Sizes = frozenset[int | Rounded]


def _sizes_in(shape: Sequence[Any]) -> _Sizes:
    """The sizes that formulas in a shape are made of."""
    return frozenset(each for size in shape if isinstance(size, Formula) for each in size.sizes)


def _products(sizes: Sequence[int | Rounded]) -> Iterator[tuple[int | Rounded, ...]]:
    """The factors of formulas."""
    for count in range(1, MOST_FACTORS + 1):
        yield from combinations_with_replacement(sizes, count)


def _complexity(formula: Formula, among: _Sizes) -> tuple[int, ...]:
    rounded = sum(isinstance(each, Rounded) for each in formula.sizes)
    others = sum(each not in among for each in formula.sizes)
    factor, rest = formula.factor, abs(formula.rest)
    return factor < 0, rest != 0, len(formula.sizes), abs(factor), others, rest, rounded


def _forms_of(step: OperatorCall, run: Recording, inputs: Sequence[Form]) -> dict[TensorRef, Form]:
    """The forms of the tensors that a step of a run takes."""
    found = {}
    for value in values_in(step.arguments):
        if value.kind == "result":
            found[value] = run.forms[value]
        elif value.kind == "input":
            found[value] = inputs[value.number]
        else:
            found[value] = form_of(run.externals[value.number])
    return found


def _rests(divisor: int, pairs: Sequence[tuple[int, int]]) -> range:
    """The numbers that give (a + number) // divisor == b for all pairs."""
    least = max(b * divisor - a for a, b in pairs)
    return range(least, min(b * divisor - a for a, b in pairs) + divisor)


def _probed(
    step: OperatorCall,
    taken: dict[TensorRef, Form],
    given: tuple[TensorRef, int],
    place: tuple[int, int],
    count: int,
) -> list[tuple[int, int]]:
    """What a step makes of `count` sizes from that of a run on, as far as it takes them.

    given: what it takes, and which dimension; place: as in `_rounded_of`.
    """
    key, dim = given
    pairs: list[tuple[int, int]] = []
    for more in range(1, count):
        shapes = {each: [*form.shape] for each, form in taken.items()}
        shapes[key][dim] += more

        def meta(value: Any, shapes: dict[TensorRef, list[int]] = shapes) -> Any:
            if not isinstance(value, TensorRef):
                return value
            return torch.empty(shapes[value], dtype=taken[value].dtype, device="meta")

        positional, named = as_given_to(step.operator, pytree.tree_map(meta, step.arguments))
        try:
            with _disable_current_modes():
                results = pytree.tree_leaves(step.operator(*positional, **named))
        except (RuntimeError, ValueError, TypeError, IndexError):
            break  # it does not take this size, or torch cannot tell without values
        number, at = place
        pairs.append((shapes[key][dim], results[number].shape[at]))
    return pairs


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
    return tuple([n.of(sizes) if isinstance(n, Sized) else n for n in numbers])


def _agrees(own: Any, value: Any, sizes: Sequence[int]) -> bool:
    """Whether a value is what stands for it, where the sizes have these values."""
    if isinstance(own, Sized):
        return type(value) is int and own.of(sizes) == value
    if isinstance(own, tuple):
        pairs = type(value) is type(own) and len(value) == len(own)
        return pairs and all(_agrees(a, b, sizes) for a, b in zip(own, value, strict=True))
    return is_equal(own, value)
