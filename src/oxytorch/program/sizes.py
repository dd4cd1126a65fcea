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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.errors import CaptureError
from . import conditions
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
from .plan import hint

MOST_FACTORS = 2
"""Sizes that a formula multiplies, such as the batch size and the length."""
MOST_STRIDE = 64
"""By how much an operator divides a size at most, such as a convolution with strides."""


class DifferentError(Exception):
    """Runs that differ in more than sizes; the text says in what, if that is known."""

    def __str__(self) -> str:
        return super().__str__() or "results differ in more than formulas of the sizes"


class Sized:
    """A number that depends on the sizes of inputs."""

    def of(self, values: Sequence[Any]) -> Any:
        """Its value, where the sizes of inputs have these."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it comes to")


@dataclass(frozen=True)
class Formula(Sized):
    """factor * the product of some sizes + rest; sizes: the numbers of those of inputs, and others
    that are rounded down."""

    factor: int
    sizes: tuple[int | Rounded, ...]
    rest: int

    def of(self, values: Sequence[Any]) -> Any:
        return self.factor * math.prod(_size_of(each, values) for each in self.sizes) + self.rest


@dataclass(frozen=True)
class Rounded(Sized):
    """(formula + rest) // divisor: what an operator with strides makes of a size."""

    formula: Formula
    rest: int
    divisor: int

    def of(self, values: Sequence[Any]) -> Any:
        return (self.formula.of(values) + self.rest) // self.divisor


@dataclass(frozen=True)
class Computed(Sized):
    """What a run on symbols computes of sizes.

    text: as Python; data: the same as an operand of a condition.
    """

    text: str
    data: Any = field(compare=False)

    def of(self, values: Sequence[Any]) -> Any:
        return conditions.value(self.data, values)


def _size_of(size: int | Rounded, values: Sequence[Any]) -> Any:
    return size.of(values) if isinstance(size, Rounded) else values[size]


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
        products = [math.prod(_size_of(each, known) for each in sizes) for known in self._known]
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
                        if found is None or found.divisor == 1:
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
        return number.of(self.sizes) if isinstance(number, Sized) else number

    def agree(self, own: Any, value: Any) -> bool:
        """Whether a value of a run on symbols is what stands for it, whatever the sizes are."""
        if isinstance(own, tuple):
            pairs = type(value) is type(own) and len(value) == len(own)
            return pairs and all(map(self.agree, own, value))
        if isinstance(own, Sized) or isinstance(value, torch.SymInt):
            is_number = isinstance(own, Sized | int) and type(value) in (int, torch.SymInt)
            difference = _expression(self.value(own)) - _expression(value) if is_number else None
            return difference is not None and _settled(difference).expand() == 0
        return is_equal(own, value)

    def settled(self, own: Any, value: Any) -> Any:
        """What stands for a value: as it was, or what a run on symbols computes, where that is
        another formula. Raises CaptureError where it is no number or another one in this run."""
        if own is value or self.agree(own, value):
            return own
        if isinstance(own, tuple) and type(value) is type(own) and len(value) == len(own):
            parts = [*map(self.settled, own, value)]
            return type(own)(*parts) if isinstance(own, Form) else tuple(parts)
        is_number = isinstance(own, Sized | int) and type(value) in (int, torch.SymInt)
        if not is_number or hint(self.value(own)) != hint(value):
            raise CaptureError("another formula")
        if type(value) is int:
            return value
        text = self._write(_settled(_expression(value)))
        return Computed(text, conditions.parse(text, self._names()))

    def _write(self, expression: Any) -> str:
        from torch.utils._sympy.printers import PythonPrinter

        return PythonPrinter().doprint(expression)  # type: ignore[no-any-return]

    def _names(self) -> dict[str, conditions.Condition]:
        return {str(symbol): ["value", n] for n, symbol in enumerate(self._symbols)}

    def conditions(self) -> list[conditions.Condition]:
        """What has to hold for sizes above 1, numbered as inputs that are numbers, for what was
        found to hold for the symbols. Raises ValueError where it is no arithmetic."""
        guards = self._env.guards
        if len(guards) != self._counted:
            names = self._names()
            texts = dict.fromkeys(self._write(guard.expr) for guard in guards)
            found = [conditions.parse(text, names) for text in texts]
            self._conditions = [each for each in found if not _always_holds(each)]
            self._counted = len(guards)
        return self._conditions

    def texts(self, places: Sequence[tuple[int, int]]) -> list[str]:
        """The same as Python, but for what says that sizes inside are above 1, which is said in
        words. places: for each size the number of an input and a dimension of it. Raises
        ValueError as `conditions` does."""
        names = [f"input_{number}.shape[{dim}]" for number, dim in places]
        every = self.conditions()
        told = [conditions.text(each, names) for each in every if not _is_of_least(each)]
        return told + ["no size inside is 1"] * (len(told) < len(every))

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
    return _is_of_least(condition) and _is_product(condition[1])


def _is_of_least(condition: Any) -> bool:
    """Whether a condition says that a number is above 1, or less than that."""
    name, *operands = condition if isinstance(condition, list) else ("", 0, 0)
    least = {"!=": (0, 1), ">=": (0, 1, 2), ">": (0, 1)}.get(name, ())
    return operands[1:] in [[n] for n in least]


def _is_product(condition: Any) -> bool:
    if not isinstance(condition, list):
        return type(condition) is int and condition >= 1
    name, *operands = condition
    return name == "value" or (name == "*" and all(map(_is_product, operands)))


def _expression(number: Any) -> Any:
    """A number as sympy has it."""
    import sympy  # type: ignore[import-untyped]

    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def _settled(expression: Any) -> Any:
    """The same with each number that is rounded down in one form: `(x // a + b) // c` as `(x + a b)
    // (a c)`, and a multiple of the divisor that is added to x outside."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv

    if not expression.has(FloorDiv):
        return expression
    arguments = [_settled(each) for each in expression.args]
    if not isinstance(expression, FloorDiv):
        return expression.func(*arguments) if arguments else expression
    base, divisor = arguments
    if not divisor.is_Integer:
        return FloorDiv(base, divisor)
    base = base.expand()
    inner = [each for each in sympy.Add.make_args(base) if isinstance(each, FloorDiv)]
    if len(inner) == 1 and inner[0].args[1].is_Integer:
        whole = base - inner[0]
        if all(each.is_integer for each in sympy.Add.make_args(whole)):
            under, by = inner[0].args
            return _settled(FloorDiv(under + whole * by, by * divisor, evaluate=False))
    rest, others = base.as_coeff_Add()
    return FloorDiv(others + rest % divisor, divisor) + rest // divisor
