"""Which layers seem slower with bytes, by timing each form of layer once.

A layer of bytes is compared with its fastest floating way, together with the rounding before it
that a program has. What the whole program gains is for others to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...ops.quantized_convolution import pack_convolution
from ...ops.quantized_linear import pack_linear
from ...rewriting import measure
from ...rewriting.measure import CLEAR_GAIN, about, numbers, seconds_of
from ..program import Program, Some, Step, Steps, Value
from .convolution_times import CONVOLUTION, LEAVING, Convolution, Ways, layer_of, ways_of_layer
from .editor import Editor, known
from .linear import EPSILON, LINEAR, LinearCall, products_of, turns_of, ways_of

QUANTIZE = "oxytorch::quantize_per_tensor"
LINEAR_OF_BYTES = "oxytorch::quantized_linear"
CONVOLUTION_OF_BYTES = "oxytorch::quantized_convolution"
PANELS = 3
"""The place of the weight of layers of bytes."""
RESULT = {LINEAR_OF_BYTES: 12, CONVOLUTION_OF_BYTES: 17}
"""The place of the dtype of their result, before its scale and zero point."""
MOST_TIMED = 16 << 20
"""Elements of a weight up to which a layer is timed; reading larger ones takes longer than all
else, and bytes are the fewest."""
LEAST_GAIN = 0.02
"""The part of the layers' time that has to be gained."""
SCALE, ZERO_POINT = 1 / 64, 128
"""Of the bytes that are timed."""
_WIDTH, _TURNS = 512, 16
"""Of rows that are rounded while that is timed; how often they are."""


@dataclass(frozen=True)
class Times:
    """Seconds of a layer.

    floating: by its fastest floating way.
    inner, outer: of bytes that are given, with a result of bytes, and of numbers; where rows are
        rounded, that is part of both.
    """

    floating: float
    inner: float
    outer: float


def timed(editor: Editor, by_rows: Mapping[Step, bool]) -> dict[Step, Times]:
    """The times of layers before any is of bytes, of those that can be timed.

    by_rows: the layers, and whether they round each row by itself.
    """
    return dict(_times_of(editor, by_rows)) if measure.TIMED else {}


def slower(
    editor: Editor, times: Mapping[Step, Times], by_panels: Mapping[Value, Step]
) -> dict[Step, str]:
    """The layers that are clearly faster in floating point, with the times as a reason; none
    where all of them together would gain too little of the time of the layers to be seen.

    editor: of a program with layers of bytes.
    times: of the layers as they were.
    by_panels: those by the panels of their weights.
    """
    found, gained, total = {}, 0.0, 0.0
    for step in editor.steps.steps:
        if step.target not in RESULT:
            continue
        place, layer = RESULT[step.target], by_panels.get(step.arguments[PANELS])
        if layer is None or layer not in times:
            continue
        own, rounding = times[layer], editor.made_by(step.arguments[0], QUANTIZE)
        seconds = own.inner if step.arguments[place] in ('"int8"', '"uint8"') else own.outer
        if rounding is not None:
            takers = len(editor.takers[step.arguments[0]])
            seconds += _rounding(rounding.arguments[0]) / takers
        total += seconds
        if own.floating <= CLEAR_GAIN * seconds:
            gained += seconds - own.floating
            found[layer] = (
                f"floating point is faster here: {own.floating * 1e6:.1f} us, "
                f"integers {seconds * 1e6:.1f} us"
            )
    return found if gained > LEAST_GAIN * total else {}


def _times_of(editor: Editor, by_rows: Mapping[Step, bool]) -> Iterator[tuple[Step, Times]]:
    """Of the layers whose sizes are known, and that are not so large that times are."""
    convolutions = [step for step in by_rows if step.target == CONVOLUTION]
    for step, is_by_rows in by_rows.items():
        x: Any = step.arguments[0].meta
        weight: Any = step.arguments[1].meta
        if known(x.shape) is None or weight.numel() > MOST_TIMED:
            continue
        if step.target == LINEAR:
            yield step, _times_of_linear(x, weight, is_by_rows)
        else:
            yield step, _times_of_convolution(layer_of(editor, step, convolutions))


def _times_of_linear(x: Tensor, weight: Tensor, by_rows: bool) -> Times:
    rows = max(1, x.numel() // x.shape[-1])
    floating = ways_of(weight)
    ways = (*floating, *((_by_rows,) if by_rows else (_rounded, _rounded_to_bytes)))
    outputs, width = weight.shape
    key = "bytes", about(outputs), about(width), weight.dtype, x.dim(), by_rows, rows
    found = seconds_of(key, partial(products_of, x, weight, ways, rows))
    turns = turns_of(weight.nbytes)
    each = [seconds / turns for seconds in found]
    best, own = min(each[: len(floating)]), each[len(floating) :]
    if by_rows:
        return Times(best, own[0], own[0])
    rounding = _rounding_of(x.numel(), weight.dtype)
    outer, inner = (max(seconds - rounding, measure.NO_TIME) for seconds in own)
    return Times(best, inner, outer)


class _CallOfBytes(LinearCall):
    """A linear layer of bytes, behind the rounding of what it takes unless it does that itself."""

    def of(self, x: Value) -> list[Step]:
        steps: list[Step] = []
        if self.arguments[0] != "none":
            rounded = Value()
            words = [repr(SCALE), str(ZERO_POINT), '"uint8"']
            steps, x = [Step(QUANTIZE, [x, *words], [rounded])], rounded
        return [*steps, *super().of(x)]


def _by_rows(weight: Tensor) -> LinearCall:
    return _call_of_bytes(weight, ["none", "0"], _floating(weight.dtype))


def _rounded(weight: Tensor) -> LinearCall:
    return _call_of_bytes(weight, [Some(repr(SCALE)), str(ZERO_POINT)], _floating(weight.dtype))


def _rounded_to_bytes(weight: Tensor) -> LinearCall:
    result = ['"uint8"', Some(repr(SCALE)), str(ZERO_POINT)]
    return _call_of_bytes(weight, [Some(repr(SCALE)), str(ZERO_POINT)], result)


def _floating(dtype: torch.dtype) -> list[Any]:
    return [f'"{dtype}"'.replace("torch.", ""), "none", "0"]


def _call_of_bytes(weight: Tensor, taken: list[Any], result: list[Any]) -> LinearCall:
    values = [Value() for _ in range(4)]
    outputs = weight.shape[0]
    scales = torch.full((outputs,), SCALE, device="cpu")
    given = (*pack_linear(_bytes_of(weight), scales), torch.zeros(outputs, device="cpu"))
    panels, factors, sums, bias = values
    arguments = [*taken, panels, factors, sums, str(outputs), Some(bias)]
    behind = ["none", "none", "0", '"none"', *result]
    return _CallOfBytes(
        LINEAR_OF_BYTES, [*arguments, *behind], dict(zip(values, given, strict=True))
    )


def _bytes_of(weight: Tensor) -> Tensor:
    return (weight.float() * 254 - 127).to(torch.int8)


def _times_of_convolution(layer: Convolution) -> Times:
    floating = ways_of_layer(layer)

    def make() -> list[Callable[[], Tensor]]:
        ways = WaysOfBytes(layer)
        return [*(getattr(ways, name) for name in floating), ways.to_bytes, ways.to_numbers]

    found = seconds_of(("bytes", layer.key), make)
    leaving = LEAVING if torch.get_num_threads() > 1 else 0.0
    after = (0.0 if name == "own" else leaving for name in floating)
    best = min(map(sum, zip(found, after, strict=False)))
    return Times(best, *found[len(floating) :])


class WaysOfBytes(Ways):
    """The same with bytes."""

    def __init__(self, layer: Convolution) -> None:
        super().__init__(layer)
        size, dims = layer.size, len(layer.stride)
        lies = (
            torch.empty(size, dtype=torch.uint8, device="cpu")
            .movedim(1, -1)
            .contiguous()
            .fill_(ZERO_POINT)
        )
        self._bytes = lies.movedim(-1, 1)
        pads = [each for each in layer.padding for _ in range(2)]
        self._geometry = [*layer.stride], pads, [*layer.dilation], layer.groups
        self._kernel = [*layer.shape[2:]]
        assert len(self._kernel) == dims
        self._panels = self._weights_of_bytes()

    def _weights_of_bytes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        weight = _bytes_of(numbers(*self._layer.shape))
        packed = pack_convolution(
            weight, torch.full((weight.shape[0],), SCALE, device="cpu"), self._layer.groups
        )
        count = self._count()
        return cycle([packed, *(tuple(map(torch.clone, packed)) for _ in range(count - 1))])  # type: ignore[list-item]

    def _result(self, dtype: str, scale: float | None, zero_point: int) -> Tensor:
        run = torch.ops.oxytorch.quantized_convolution.default
        weight, outputs = next(self._panels), self._layer.shape[0]
        given = self._bytes, SCALE, ZERO_POINT, *weight, self._kernel, outputs, None, None
        found: Tensor = run(*given, *self._geometry, None, 0, "none", dtype, scale, zero_point)
        return found

    def to_bytes(self) -> Tensor:
        """With a result of bytes."""
        return self._result("uint8", SCALE, ZERO_POINT)

    def to_numbers(self) -> Tensor:
        """With a result of numbers."""
        return self._result(str(self._layer.dtype).removeprefix("torch."), None, 0)


def _rounding(value: Value) -> float:
    """Seconds in which the numbers of a value are rounded; 0 where their number is not known."""
    meta: Any = value.meta
    if meta is None or known(meta.shape) is None:
        return 0.0
    return _rounding_of(meta.numel(), meta.dtype)


def _rounding_of(count: int, dtype: torch.dtype) -> float:
    """Seconds in which so many numbers are rounded inside a program."""
    rows = max(1, count // _WIDTH)

    def make() -> list[Callable[[], Any]]:
        given = numbers(rows, _WIDTH).to(dtype)
        programs = [_rounds(is_rounded) for is_rounded in (True, False)]
        return [partial(program, [given]) for program in programs]

    rounded, plain = seconds_of(("rounding", about(rows), dtype), make)
    return max(rounded - plain, 0.0) / _TURNS


def _rounds(is_rounded: bool) -> Program:
    """A program that makes numbers again and again, and rounds them if it is to."""
    x, steps = Value(), Steps()
    steps.inputs.append(x)
    for _ in range(_TURNS):
        written, rounded = Value(), Value()
        steps.steps.append(Step("oxytorch::rms_norm", [x, "none", EPSILON], [written]))
        if is_rounded:
            words = [repr(SCALE), str(ZERO_POINT), '"uint8"']
            steps.steps.append(Step(QUANTIZE, [written, *words], [rounded]))
        steps.outputs = [rounded if is_rounded else written]
    return steps.program()
