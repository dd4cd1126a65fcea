"""Pass that computes layers twice: in floating point, and with bytes beside, to tell the error.

What is compared is what the layer itself gives, before an activation or a sum; what others take is
the floating result, so that each error is that of one layer alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..program import Some, Step, Value
from . import recurrent
from .convolution import padded_input
from .editor import Editor, known
from .linear import LINEAR
from .moves import of_bytes
from .quantized import DEQUANTIZE, all_layers, convolution_of_bytes, linear_of_bytes, rounding
from .quantized_layers import Layer, Numbers, Quantization
from .quantized_weights import LARGEST, SMALLEST, Making


@dataclass(frozen=True)
class Compared:
    """What a layer costs, and the squares of what it takes and gives.

    products: of numbers that a call of it multiplies.
    squares: sums over all elements, float64: of what it takes, of the rounding of that, of what it
        gives, and of the error of that; empty for layers that multiply no bytes.
    """

    products: int
    squares: tuple[Value, ...] = ()


def compare(editor: Editor, quantization: Quantization) -> dict[str, Compared]:
    """Compute the layers that are named with bytes too."""
    found: dict[str, Compared] = {}
    for step, name, why in [*all_layers(editor, quantization.names)]:
        layer = quantization.layers.by_name.get(name)
        products = _products(step)
        if why or layer is None or (layer.input is None and step.target != LINEAR):
            found[name] = Compared(products)
            continue
        make = Making(editor.steps.constants)
        squares = _squares(editor, make, step, layer)
        editor.replace(step, step, *make.steps)
        found[name] = Compared(products, squares)
    _compare_recurrent(editor, quantization, found)
    steps, count = editor.steps, len(editor.steps.outputs)
    steps.outputs = [*steps.outputs, *(v for each in found.values() for v in each.squares)]
    editor.apply()
    del steps.outputs[count:]
    return found


def _compare_recurrent(
    editor: Editor, quantization: Quantization, found: dict[str, Compared]
) -> None:
    """The same of recurrent layers, whose steps belong to modules."""
    for layer, name, why in [*recurrent.layers_of(editor, quantization.names)]:
        before, result = found.get(name), layer.step.results[0]
        products = layer.products + (0 if before is None else before.products)
        found[name] = Compared(products, () if before is None else before.squares)
        if why or result is None or name not in quantization.layers.by_name:
            continue
        make = Making(editor.steps.constants)
        near, given = _near_rows(make, layer.x), Value(meta=result.meta)
        made = recurrent.of_bytes(layer, [given, *[None] * len(layer.states)], make, {})
        make.steps += made
        squares = _squares_of(make, ((layer.x, near), (result, make.to(given, torch.float32))))
        if before is not None and before.squares:
            pairs = zip(before.squares, squares, strict=True)
            squares = tuple(make("add", first, second, "1.0") for first, second in pairs)
        editor.replace(layer.step, layer.step, *make.steps)
        found[name] = Compared(products, squares)


def _products(step: Step) -> int:
    """The products of a call, 0 where sizes are not known."""
    is_transposed = step.target != LINEAR and step.arguments[6] != "false"
    each = step.arguments[0] if is_transposed else step.results[0]
    weight: Any = step.arguments[1].meta
    if each is None or each.meta is None or weight is None or not weight.numel():
        return 0
    size = known(each.meta.shape)
    return 0 if size is None else math.prod(size) * weight[0].numel()


def _squares(editor: Editor, make: Making, step: Step, layer: Layer) -> tuple[Value, ...]:
    x, (result,), numbers = step.arguments[0], step.results, layer.input
    assert result is not None
    own = replace(step, results=[Value(meta=result.meta)])
    if numbers is None:
        near = _near_rows(make, x)
        make.steps.append(linear_of_bytes(own, x, None, make))
    else:
        source, pads = (x, []) if step.target == LINEAR else padded_input(editor, step)
        taken = of_bytes(source, numbers.torch_dtype)
        make.steps.append(rounding(source, numbers, taken))
        x, near = source, _near(make, taken, numbers)
        if step.target == LINEAR:
            make.steps.append(linear_of_bytes(own, taken, numbers, make))
        else:
            make.steps.append(convolution_of_bytes(own, taken, pads, numbers, make))
    (given,) = own.results
    assert given is not None
    return _squares_of(make, ((x, near), (result, make.to(given, torch.float32))))


def _squares_of(make: Making, pairs: Sequence[tuple[Value, Value]]) -> tuple[Value, ...]:
    """Of the first ones, and of what the second ones differ by."""
    return tuple(
        _sum_of_squares(make, value)
        for first, second in pairs
        for wide in (make.to(first, torch.float32),)
        for value in (wide, make("add", wide, second, "-1.0"))
    )


def _near(make: Making, taken: Value, numbers: Numbers) -> Value:
    """The numbers that bytes stand for."""
    return make(DEQUANTIZE, taken, repr(numbers.scale), str(numbers.zero_point), '"float32"')


def _near_rows(make: Making, x: Value) -> Value:
    """What `quantized_linear` multiplies in place of rows that it rounds by their own ranges."""
    wide = make.to(x, torch.float32)
    largest = make("aten::amax", make("aten::abs", wide), ["-1"], "true")
    steps = make("aten::div.Tensor", largest, make.constant(LARGEST))
    steps = make("aten::maximum", steps, make.constant(SMALLEST))
    whole = make("aten::round", make("aten::div.Tensor", wide, steps))
    return make("aten::mul.Tensor", whole, steps)


def _sum_of_squares(make: Making, value: Value) -> Value:
    return make("aten::sum", make("aten::mul.Tensor", value, value), Some("=float64"))
