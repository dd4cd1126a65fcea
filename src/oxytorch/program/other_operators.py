"""Operators that a program calls by other operators, and how they are written.

Those that torch's C shims do not pass, and those for which torch itself calls another or which a
step says better. A function returns what the node makes; None where its own operator will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..graph.errors import CaptureError
from .allowed import RESAMPLED
from .program import Argument, Some, Step, Value
from .words import holds, name_of_dtype, word_of

if TYPE_CHECKING:
    from .capture import Capture

_aten = torch.ops.aten

ACTIVATION = "oxytorch::activation"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of tensors that kernels of ours take."""

_SUMS = {
    _aten.add.Tensor: 1,
    _aten.add.Scalar: 1,
    _aten.sub.Tensor: -1,
    _aten.sub.Scalar: -1,
    _aten.rsub.Tensor: -1,
    _aten.rsub.Scalar: -1,
}

RESAMPLING = tuple(
    getattr(getattr(_aten, f"upsample_{kind}"), overload)
    for kind in (
        "nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d",
    )
    for overload in ("vec", "default")
) + tuple(
    getattr(getattr(_aten, f"_upsample_{kind}"), overload)
    for kind in (
        "bilinear2d_aa", "bicubic2d_aa", "nearest_exact1d", "nearest_exact2d", "nearest_exact3d",
    )
    for overload in ("vec", "default")
)  # fmt: skip
"""Operators of `interpolate`, for which torch has Python code of many small ones."""

MOST_RESAMPLED = 1 << 20
"""A size from which on one that is divided by another in float32 may not be what it is by way of
float64."""

_PADS = tuple(
    getattr(_aten, f"{kind}_pad{dims}d").default
    for kind in ("reflection", "replication")
    for dims in (1, 2, 3)
)


def meta_of(value: Any) -> Any:
    """The tensor without memory that says what a node makes; None if it makes no tensor."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _sum(capture: Capture, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    """a + alpha b and its like."""
    func: Any = node.target
    dtype = node.meta["val"].dtype
    if func in (_aten.rsub.Tensor, _aten.rsub.Scalar):
        a, b = b, a
    if isinstance(alpha, complex | fx.Node):
        raise CaptureError(f"{func} with a factor that is complex or a size")
    given = [a, b]
    if dtype != torch.bool:
        given = [int(each) if isinstance(each, bool) else each for each in given]
    first, second = (capture.tensor(each, given) for each in given)
    if dtype == torch.bool:
        if not alpha:
            raise CaptureError(f"{func} of truth values with the factor 0")
        return capture.emit("aten::logical_or", [first, second], Value())
    factor = alpha * _SUMS[func]
    if dtype.is_floating_point or dtype.is_complex:
        if _is_bool(a):
            first = _converted(capture, first, dtype)
        if _is_bool(b):
            second = _converted(capture, second, dtype)
        return capture.emit("add", [first, second, repr(float(factor))], Value())
    if factor != 1 and isinstance(b, fx.Node):
        own = torch.int64 if meta_of(b) is None else meta_of(b).dtype  # None: a size
        second = _times(capture, second, own, factor, dtype)
    elif factor != 1:
        second = capture.tensor(int(b) * factor, given)
    return _sum_of_integers(capture, first, second, dtype)


def _is_bool(given: Any) -> bool:
    meta = meta_of(given)
    return meta is not None and meta.dtype == torch.bool


def _converted(capture: Capture, value: Value, dtype: torch.dtype) -> Value:
    words = [value, Some(name_of_dtype(dtype)), *["none"] * 3, "false", "none"]
    return capture.emit("aten::_to_copy", words, Value())


def _times(
    capture: Capture, value: Value, own: torch.dtype, factor: int, dtype: torch.dtype
) -> Value:
    """An integer tensor of the dtype `own`, in another one, times a factor."""
    if own != dtype:
        value = _converted(capture, value, dtype)
    if abs(factor) != 1:
        if not holds(dtype, abs(factor)):
            raise CaptureError(f"a sum of {dtype} has the factor {factor}")
        number = capture.constant(torch.tensor(abs(factor), dtype=dtype, device="cpu"))
        value = capture.emit("aten::mul.Tensor", [value, number], Value())
    return capture.emit("aten::neg", [value], Value()) if factor < 0 else value


def _sum_of_integers(capture: Capture, first: Value, second: Value, dtype: torch.dtype) -> Value:
    """The step `add` has a factor of floating point, which integers do not take."""
    parts: list[Value | None] = [Value(), Value()]
    pair: Argument = [first, second]
    capture.steps.steps.append(Step("aten::broadcast_tensors", [pair], parts, returns_list=True))
    stacked = capture.emit("aten::stack", [parts, "0"], Value())
    words = [stacked, Some(["0"]), "false", Some(name_of_dtype(dtype))]
    return capture.emit("aten::sum.dim_IntList", words, Value())


def _linear(capture: Capture, node: fx.Node, bias: Any, x: Any, weight: Any, *factors: Any) -> Any:
    """addmm(bias, x, weight.t()) is a linear layer."""
    if factors != (1, 1) or len(meta_of(bias).shape) != 1:
        raise CaptureError("addmm with factors or a bias of two dimensions")
    matrix = capture.values[weight]
    own = capture.transposed.get(matrix)
    if own is None:
        own = capture.emit("aten::t", [matrix], Value(meta=meta_of(weight).t()))
    words = [capture.values[x], own, Some(capture.values[bias])]
    return capture.emit("aten::linear", words, Value())


def _power(capture: Capture, node: fx.Node, x: Any, exponent: Any) -> Any:
    """The exponents for which torch calls no `pow`."""
    own = capture.values[x]
    root = {0.5: "aten::sqrt", -0.5: "aten::rsqrt"}.get(exponent)
    if root is not None and meta_of(x).dtype != torch.float16:
        return capture.emit(root, [own], Value())
    if meta_of(x).dtype == torch.bool and isinstance(exponent, bool):
        raise CaptureError(f"{node.target} of truth values to the power {exponent}")
    # Integers to a power of floating point and truth values give other dtypes than products do.
    if exponent not in (2, 3) or meta_of(x).dtype != node.meta["val"].dtype:
        return None
    square = capture.emit("aten::mul.Tensor", [own, own], Value())
    return square if exponent == 2 else capture.emit("aten::mul.Tensor", [square, own], Value())


def _resampled(capture: Capture, node: fx.Node, *arguments: Any) -> Any:
    """By factors: the library's way into torch cannot pass sizes to these operators."""
    operator: Any = node.target
    found = by_factors(operator, meta_of(arguments[0]), arguments)
    if found is not None:
        return capture.call(node, operator.overloadpacket.vec, found)
    if not is_by_sizes(operator, meta_of(arguments[0]), arguments):
        raise CaptureError(f"the library's way into torch cannot pass the sizes of {operator}")
    named, name = _named(operator, arguments), _resampling(operator)
    sizes = [capture.size(each) for each in named["output_size"]]
    align = "none" if "nearest" in name else str(named["align_corners"]).lower()
    words = [capture.values[arguments[0]], f'"{name}"', sizes, align]
    return capture.emit("resample", words, Value())


def is_by_sizes(operator: Any, x: Any, arguments: Sequence[Any]) -> bool:
    """Whether a step `resample` does what an operator of `interpolate` does; x: as in `by_factors`.

    What the operator makes of a factor besides the sizes is not known where these are no numbers.
    """
    named = _named(operator, arguments)
    is_scaled = any(named[each] is not None for each in named if each.startswith("scale"))
    is_known = _resampling(operator) in RESAMPLED and x is not None and x.dtype in DTYPES
    return is_known and not is_scaled


def _named(operator: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in operator._schema.arguments), arguments, strict=True))


def _resampling(operator: Any) -> str:
    return operator.name().partition(".")[0].removeprefix("aten::")  # type: ignore[no-any-return]


def by_factors(operator: Any, x: Any, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """The arguments by which an operator of `interpolate` resamples by factors, and to no size, as
    its overload `vec` does; None where the factors are not known.

    x: the tensor that is resampled, or one of its form. Factors in float64 are precise enough for
    the very indices and weights, which are float32 for these dtypes, up to MOST_RESAMPLED.
    """
    named = _named(operator, arguments)
    sizes = named["output_size"]
    if sizes is None:
        return tuple(arguments)
    if x is None or x.dtype not in DTYPES:
        return None
    sizes = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in sizes]
    factors = [_factor(*both) for both in zip(x.shape[2:], sizes, strict=True)]
    given = [number for name, number in named.items() if name.startswith("scales")]
    scales = []
    for size, wanted, factor, scale in zip(
        x.shape[2:], sizes, factors, given or [None] * len(sizes), strict=True
    ):
        if factor is None:
            return None
        is_plain = type(size) is type(wanted) is int
        if scale is not None and not (is_plain and int(size * scale) == wanted):
            return None
        scales.append(factor if scale is None else scale)
    align = [named["align_corners"]] if "align_corners" in named else []
    return (arguments[0], None, *align, scales)


def _factor(size: Any, wanted: Any) -> float | None:
    """The least number in float64 that is a size times which is another, and no less."""
    if not all(isinstance(each, int | torch.SymInt) for each in (size, wanted)):
        return None
    if type(size) is int and type(wanted) is int:
        if min(size, wanted) < 1 or max(size, wanted) >= MOST_RESAMPLED:
            return None
        ratio = Fraction(wanted, size)
    else:
        import sympy  # type: ignore[import-untyped]

        above, below = (
            each.node.expr if isinstance(each, torch.SymInt) else sympy.Integer(each)
            for each in (wanted, size)
        )
        found = sympy.cancel(above / below)
        if not found.is_Rational or not found > 0:
            return None
        ratio = Fraction(int(found.p), int(found.q))
    factor = float(ratio)
    return factor if Fraction(factor) >= ratio else math.nextafter(factor, math.inf)


def _clamped(capture: Capture, node: fx.Node, x: Any, low: Any = None, high: Any = None) -> Any:
    """By operators with fast loops for one number: that of clamp with tensors has none."""
    found = capture.values[x]
    if (low, high) == (0, 6) and meta_of(x).is_floating_point():
        return capture.emit("aten::relu6", [found], Value())
    for name, bound in (("aten::maximum", low), ("aten::minimum", high)):
        if bound is not None:
            number = capture.tensor(bound, [x])
            found = capture.emit(name, [found, number], Value())
    return found


def _clamped_above(capture: Capture, node: fx.Node, x: Any, high: Any) -> Any:
    return _clamped(capture, node, x, None, high)


def _leaky_relu(capture: Capture, node: fx.Node, x: Any, slope: Any = 0.01) -> Any:
    return _activation(capture, x, "leaky_relu", [slope])


def _elu(
    capture: Capture, node: fx.Node, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1
) -> Any:
    if input_scale <= 0:
        raise CaptureError(f"{node.target} with an input_scale of {input_scale}")
    return _activation(capture, x, "elu", [alpha, scale, input_scale])


def _activation(capture: Capture, x: Any, name: str, numbers: list[Any]) -> Any:
    """By our operator: those of torch take numbers of any type, which a program cannot pass."""
    if meta_of(x).dtype not in DTYPES:
        raise CaptureError(f"{name} of {name_of_dtype(meta_of(x).dtype)}")
    return capture.emit(ACTIVATION, [capture.values[x], *activation_words(name, numbers)], Value())


def activation_words(name: str, numbers: list[Any]) -> list[Argument]:
    """What follows the tensor in a step of `ACTIVATION`."""
    return [f'"{name}"', [word_of(float(number), "FloatType") for number in numbers]]


def _padded(capture: Capture, node: fx.Node, x: Any, pad: Any, value: Any) -> Any:
    sizes = [capture.size(each) for each in pad]
    words = [capture.values[x], sizes, '"constant"', Some(word_of(value, "FloatType"))]
    return capture.emit("aten::pad", words, Value())


def _reflected(capture: Capture, node: fx.Node, x: Any, pad: Any) -> Any:
    """By `pad`, since the operators for each number of dimensions take plain integers."""
    kind = "reflect" if "reflection" in str(node.target) else "replicate"
    words = [capture.values[x], [capture.size(each) for each in pad], f'"{kind}"', "none"]
    return capture.emit("aten::pad", words, Value())


def _scattered(capture: Capture, node: fx.Node, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Of a number, as a tensor of the index's shape."""
    if not isinstance(value, bool | int | float):
        raise CaptureError(f"{node.target} of a {type(value).__name__}")
    one = capture.constant(torch.tensor(value, dtype=meta_of(x).dtype, device="cpu"))
    places = capture.values[index]
    size = [_extent(capture, places, place) for place in range(meta_of(index).dim())]
    source = capture.emit("aten::expand", [one, size, "false"], Value())
    words = [capture.values[x], str(dim), places, source]
    return capture.emit("aten::scatter.src", words, Value())


def _batched(capture: Capture, node: fx.Node, sum_: Any, a: Any, b: Any, *factors: Any) -> Any:
    if factors != (1, 1):
        raise CaptureError("baddbmm with factors")
    product = capture.emit("aten::bmm", [capture.values[a], capture.values[b]], Value())
    dtype = node.meta["val"].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return _sum_of_integers(capture, capture.values[sum_], product, dtype)
    return capture.emit("add", [capture.values[sum_], product, "1.0"], Value())


def _transpose(capture: Capture, node: fx.Node, x: Any, *dims: Any) -> Any:
    found = capture.call(node, node.target, [x, *dims])
    if not dims or (len(meta_of(x).shape) == 2 and dims in (([1, 0],), (0, 1), (1, 0))):
        capture.transposed[found] = capture.values[x]
    return found


def _full(capture: Capture, node: fx.Node, size: Any, value: Any, *_: Any) -> Any:
    meta = node.meta["val"]
    if isinstance(size, fx.Node):  # full_like
        size = [_extent(capture, capture.values[size], place) for place in range(meta.dim())]
    else:
        size = [capture.size(each) for each in size]
    if isinstance(value, fx.Node):
        one = _size(capture, value, meta.dtype)
    else:
        one = capture.constant(torch.tensor(value, dtype=meta.dtype, device="cpu"))
    expanded = capture.emit("aten::expand", [one, size, "false"], Value())
    return capture.emit("aten::clone", [expanded, Some("=contiguous_format")], Value())


def _extent(capture: Capture, tensor: Value, place: int) -> Value:
    return capture.emit("size", [tensor, str(place)], Value(is_size=True))


def _size_of(capture: Capture, node: fx.Node, x: Any, place: Any) -> Value:
    return _extent(capture, capture.values[x], place)


def _scalar(capture: Capture, node: fx.Node, value: Any, *_: Any) -> Value:
    if isinstance(value, fx.Node):
        return _size(capture, value, node.meta["val"].dtype)
    return _own(capture, torch.tensor(value, dtype=node.meta["val"].dtype, device="cpu"))


def _size(capture: Capture, node: fx.Node, dtype: torch.dtype) -> Value:
    """A size as a new tensor without dimensions."""
    size = capture.values[node]
    if not (isinstance(size, Value) and size.is_size):
        raise CaptureError("a number becomes a tensor")
    return _converted(capture, capture.size_as_tensor(size), dtype)


def _own(capture: Capture, tensor: Tensor) -> Value:
    """A new tensor at each call, which may be returned and written to."""
    return capture.emit("aten::clone", [capture.constant(tensor), "none"], Value())


def _arange(capture: Capture, node: fx.Node, *given: Any) -> Value:
    start, end, step = {5: (0, given[0], 1), 6: (given[0], given[1], 1)}.get(len(given), given[:3])
    dtype = node.meta["val"].dtype
    if not any(isinstance(each, fx.Node) for each in (start, end, step)):
        return _own(capture, torch.arange(start, end, step, dtype=dtype, device="cpu"))
    if dtype.is_floating_point or isinstance(step, fx.Node) or step < 1:
        raise CaptureError("arange of sizes in floating point, or by a step that is not above 0")
    begin, count = capture.size(start), capture.size(end)
    if start != 0:
        count = capture.emit("-", [count, begin], Value(is_size=True))
    if step != 1:
        more = capture.emit("+", [count, str(step - 1)], Value(is_size=True))
        count = capture.emit("/", [more, str(step)], Value(is_size=True))
    # -1, -2, ... with all bits turned is 0, 1, ...
    one = capture.constant(torch.tensor(-1, dtype=dtype, device="cpu"))
    ones = capture.emit("aten::expand", [one, [count], "false"], Value())
    sums = capture.emit("aten::cumsum", [ones, "0", Some(name_of_dtype(dtype))], Value())
    found = capture.emit("aten::bitwise_not", [sums], Value())
    if step != 1:
        found = _times(capture, found, dtype, step, dtype)
    if isinstance(start, fx.Node):
        negative = capture.emit("*", [begin, "-1"], Value(is_size=True))
        for size, sign in ((begin, 1), (negative, -1)):  # a tensor's size is never below 0
            own = capture.emit(">", [size, "0"], Value(is_size=True))
            part = _times(capture, capture.size_as_tensor(own), torch.int64, sign, torch.int64)
            found = _sum_of_integers(capture, found, part, dtype)
    elif start != 0:
        first = capture.constant(torch.tensor(start, dtype=dtype, device="cpu"))
        found = _sum_of_integers(capture, found, first, dtype)
    return found


_CODES = {torch.quint8: torch.uint8, torch.qint8: torch.int8}
"""Dtypes of torch's quantized tensors of bytes, and those of the bytes."""


def _to_codes(
    capture: Capture, node: fx.Node, x: Any, scale: Any, zero_point: Any, dtype: Any
) -> Value:
    """A quantized tensor of torch as its bytes."""
    own = _CODES.get(dtype)
    if own is None or isinstance(scale, fx.Node) or isinstance(zero_point, fx.Node):
        raise CaptureError(f"{node.target} to {dtype}, or with numbers that are computed")
    meta = meta_of(x)
    result = Value(meta=meta.new_empty_strided(meta.shape, meta.stride(), dtype=own))
    words = [repr(float(scale)), str(zero_point), f'"{own}"'.replace("torch.", "")]
    return capture.emit("oxytorch::quantize_per_tensor", [capture.values[x], *words], result)


def _from_codes(capture: Capture, node: fx.Node, x: Any) -> Value:
    """The numbers of a quantized tensor, by what quantized it."""
    if x.target is not _aten.quantize_per_tensor.default:
        raise CaptureError(f"{node.target} of what {x.target} makes")
    integers = capture.values[x]
    (words,) = (s.arguments[1:3] for s in capture.steps.steps if integers in s.results)
    words = [*words, '"float32"']
    return capture.emit("oxytorch::dequantize_per_tensor", [integers, *words], Value())


SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_SUMS, _sum),
    _aten.addmm.default: _linear,
    _aten.baddbmm.default: _batched,
    _aten.constant_pad_nd.default: _padded,
    _aten.pow.Tensor_Scalar: _power,
    **dict.fromkeys(_PADS, _reflected),
    _aten.scatter.value: _scattered,
    _aten.clamp.default: _clamped,
    _aten.clamp_min.default: _clamped,
    _aten.clamp_max.default: _clamped_above,
    _aten.hardtanh.default: _clamped,
    _aten.leaky_relu.default: _leaky_relu,
    _aten.elu.default: _elu,
    _aten.t.default: _transpose,
    _aten.permute.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.full.default: _full,
    _aten.full_like.default: _full,
    **dict.fromkeys(RESAMPLING, _resampled),
    _aten.quantize_per_tensor.default: _to_codes,
    _aten.dequantize.self: _from_codes,
    _aten.sym_size.int: _size_of,
    _aten.scalar_tensor.default: _scalar,
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
}
