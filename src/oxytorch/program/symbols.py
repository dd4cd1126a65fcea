"""Sizes as symbols of torch, and the conditions for what holds for them to hold for sizes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..graph.errors import CaptureError
from . import conditions
from .calls import Form, is_equal
from .plan import hint
from .sized import Computed, Sized


class Symbols:
    """Sizes as symbols, by which passes tell what holds for all of them.

    values: those of a run that a program is made of.
    """

    def __init__(self, values: Sequence[int]) -> None:
        # Which torch takes a second to import; as a whole first, as optimizers of other threads do,
        # for which an import of a part of it would not wait.
        import_module("torch._dynamo")
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self._symbols, self.sizes = [], []
        self._conditions: list[conditions.Condition] = []
        self._counted = 0  # guards that these are of
        self._compared: dict[tuple[Any, Any], bool] = {}
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
            return is_number and self._are_equal(own, _expression(value))
        return is_equal(own, value)

    def _are_equal(self, own: Any, expression: Any) -> bool:
        """Whether a number, which may be a formula, is an expression of the symbols."""
        found = self._compared.get((own, expression))
        if found is None:
            difference = _expression(self.value(own)) - expression
            found = self._compared[own, expression] = _settled(difference).expand() == 0
        return found

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

    def has_number(self) -> bool:
        """Whether a symbol was found to be the size of this run, as `int(size)` makes it."""
        return any(self._env.replace(symbol).is_number for symbol in self._symbols)

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
