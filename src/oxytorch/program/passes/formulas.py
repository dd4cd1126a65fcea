"""Pass over activations that are written as formulas."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..other_operators import ACTIVATION, activation_words
from ..program import Argument, Step, Value
from .editor import Editor
from .norms import DTYPES

_TANH = (math.sqrt(2 / math.pi), 0.044715)
"""GELU's approximation is x / 2 * (1 + tanh(a (x + b x^3))): a and b."""


def activations(editor: Editor) -> None:
    """Write x * sigmoid(x), x / 2 * (1 + erf(x / sqrt(2))), where(x > 0, x, slope * x) and the like
    as one step."""
    for step in editor.steps.steps:
        if step.target == "aten::where.self":
            _leaky_relu(editor, step)
        if step.target != "aten::mul.Tensor":
            continue
        found = _silu(editor, step) or _gelu(editor, step)
        if found is not None and _is_floating(found[1][0]):
            editor.replace(step, Step(*found, step.results))
    editor.apply()


def with_numbers(editor: Editor) -> None:
    """Compute mish, x * x * x, and clamping by two numbers, each in one sweep."""
    for step in editor.steps.steps:
        if step.target == "aten::mish" and _is_narrow(step.arguments[0]):  # torch's is slow
            words = [step.arguments[0], *activation_words("mish", [])]
            editor.replace(step, Step(ACTIVATION, words, step.results))
        found = _clamp(editor, step) or _cube(editor, step)
        if found is None:
            continue
        inner, x, words = found
        made = None if inner is None else inner.results[0]
        if inner is None or made is None or editor.only_taker(made) is not step:
            continue
        if _is_narrow(x):
            editor.replace(inner)
            editor.replace(step, Step(ACTIVATION, [x, *words], step.results))
    editor.apply()


def _is_narrow(value: Argument) -> bool:
    """Whether a tensor is known to have a dtype that kernels of ours take."""
    return isinstance(value, Value) and value.meta is not None and value.meta.dtype in DTYPES


_Joined = tuple[Step | None, Argument, list[Argument]]


def _clamp(editor: Editor, step: Step) -> _Joined | None:
    if step.target != "aten::minimum":
        return None
    largest = editor.made_by(step.arguments[0], "aten::maximum")
    bounds = [editor.number(each.arguments[1]) for each in (largest, step) if each is not None]
    if largest is None or any(number is None or math.isnan(number) for number in bounds):
        return None
    return largest, largest.arguments[0], activation_words("clamp", bounds)


def _cube(editor: Editor, step: Step) -> _Joined | None:
    if step.target != "aten::mul.Tensor":
        return None
    for value, x in _orders(step):
        square = editor.made_by(value, "aten::mul.Tensor")
        if square is not None and all(each is x for each in square.arguments):
            return square, x, activation_words("power", [3])
    return None


def _is_floating(value: Argument) -> bool:
    """Whether a tensor is known to have a dtype that these functions are defined for."""
    meta = value.meta if isinstance(value, Value) else None
    return meta is not None and meta.is_floating_point()


def _leaky_relu(editor: Editor, step: Step) -> None:
    """Leaky ReLU, also as a program holds torch's operator, which takes a number of any type; in
    dtypes that hold the slope as torch has it."""
    is_above, x, scaled = step.arguments
    compared = editor.made_by(is_above, "aten::gt.Tensor")
    product = editor.made_by(scaled, "aten::mul.Tensor")
    meta = x.meta if isinstance(x, Value) else None
    if compared is None or product is None or meta is None or meta.dtype not in _WITH_SLOPES:
        return
    if compared.arguments[0] is not x or editor.number(compared.arguments[1]) != 0:
        return
    slopes = (editor.number(b) for a, b in _orders(product) if a is x)
    slope = next((number for number in slopes if number is not None), None)
    if slope is not None:
        value = Value()
        editor.steps.constants[value] = torch.tensor(slope, dtype=meta.dtype, device="cpu")
        editor.replace(step, Step("aten::_prelu_kernel", [x, value], step.results))


_WITH_SLOPES = (torch.float32, torch.float64)
_Call = tuple[str, list[Argument]]


def _silu(editor: Editor, step: Step) -> _Call | None:
    for x, other in _orders(step):
        gate = editor.made_by(other, "aten::sigmoid")
        if gate is not None and gate.arguments[0] is x:
            return "aten::silu", [x]
    return None


def _gelu(editor: Editor, step: Step) -> _Call | None:
    """x / 2 * (1 + inner), or x * ((1 + inner) / 2), in any order."""
    for half, other in _orders(step):
        x = _scaled(editor, half, 0.5)
        inner = None if x is None else _plus_one(editor, other)
        if x is None:
            x, sum_ = half, _scaled(editor, other, 0.5)
            inner = None if sum_ is None else _plus_one(editor, sum_)
        if inner is not None:
            algorithm = _algorithm(editor, inner, x)
            if algorithm is not None:
                return "aten::gelu", [x, f'"{algorithm}"']
    for first, second in _orders(step):  # (x (1 + inner)) / 2
        product = editor.made_by(first, "aten::mul.Tensor")
        if product is None or editor.number(second) != 0.5:
            continue
        for x, sum_ in _orders(product):
            inner = _plus_one(editor, sum_)
            algorithm = None if inner is None else _algorithm(editor, inner, x)
            if algorithm is not None:
                return "aten::gelu", [x, f'"{algorithm}"']
    return None


def _algorithm(editor: Editor, inner: Value, x: Argument) -> str | None:
    """Which of GELU's forms has this function of x."""
    erf = editor.made_by(inner, "aten::erf")
    if erf is not None:
        return "none" if _scaled(editor, erf.arguments[0], math.sqrt(0.5)) is x else None
    tanh = editor.made_by(inner, "aten::tanh")
    if tanh is None:
        return None
    sum_ = editor.made_by(_scaled(editor, tanh.arguments[0], _TANH[0]), "add")
    if sum_ is None or sum_.arguments[2] != "1.0":
        return None
    for first, second in _orders(sum_):
        if first is x and _is_cube(editor, _scaled(editor, second, _TANH[1]), x):
            return "tanh"
    return None


def _is_cube(editor: Editor, value: Value | None, x: Argument) -> bool:
    cube = editor.made_by(value, "aten::mul.Tensor")
    if cube is None:
        return False
    squares = (editor.made_by(a, "aten::mul.Tensor") for a, b in _orders(cube) if b is x)
    return any(s is not None and all(a is x for a in s.arguments) for s in squares)


def _plus_one(editor: Editor, value: Argument) -> Value | None:
    """What one is added to."""
    sum_ = editor.made_by(value, "add")
    if sum_ is None or sum_.arguments[2] != "1.0":
        return None
    return next((a for a, b in _orders(sum_) if editor.number(b) == 1), None)


def _scaled(editor: Editor, value: Argument, factor: float) -> Value | None:
    """What is multiplied with a number, or divided by its inverse."""
    product = editor.made_by(value, "aten::mul.Tensor", "aten::div.Tensor")
    if product is None:
        return None
    if product.target == "aten::div.Tensor":
        number = editor.number(product.arguments[1])
        is_it = number is not None and math.isclose(number * factor, 1, rel_tol=_close(value))
        return product.arguments[0] if is_it else None
    pairs = ((a, editor.number(b)) for a, b in _orders(product))
    near = (a for a, n in pairs if n is not None and math.isclose(n, factor, rel_tol=_close(value)))
    return next(near, None)


def _close(value: Argument) -> float:
    """By how much constants that are written out to some digits may differ, in this dtype."""
    meta = value.meta if isinstance(value, Value) else None
    is_narrow = meta is not None and meta.dtype in DTYPES
    return 1e-6 if is_narrow else 1e-14


def _orders(step: Step) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    first, second = step.arguments[:2]
    return (first, second), (second, first)
