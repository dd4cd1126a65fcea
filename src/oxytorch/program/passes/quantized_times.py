"""Which layers would be slower with bytes, by timing each form of layer once.

A layer of bytes is compared with its fastest floating way. What it costs beside its products
depends on its neighbours: numbers are rounded before it, unless the layers before it give bytes.
So a choice of layers is judged by the steps that it leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...ops.quantized_convolution import pack_convolution
from ...ops.quantized_linear import pack_weight, padded
from ...rewriting import measure
from ...rewriting.measure import about, numbers, seconds_of
from ..program import Some, Step, Steps, Value
from .convolution_times import CONVOLUTION, LEAVING, Convolution, Ways, layer_of, ways_of_layer
from .editor import Editor, known
from .linear import LINEAR, Call, products_of, turns_of, ways_of

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
SCALE, ZERO_POINT = 1 / 64, 128
"""Of the bytes that are timed."""
_WIDTH = 512
"""Of rows that are rounded while that is timed."""


@dataclass(frozen=True)
class Times:
    """Seconds of a layer. floating: by its fastest floating way. inner, outer: of bytes that are
    given, with a result of bytes, and of numbers; rows: outer rounds its rows itself."""

    floating: float
    inner: float
    outer: float


Try = Callable[[frozenset[Step]], tuple[Steps, Mapping[Value, Step]]]
"""The steps that come of layers of bytes, and the layers by their weights' panels."""


def slower(
    editor: Editor, by_rows: Mapping[Step, bool], attempt: Try
) -> dict[Step, str]:
    """The layers that are faster in floating numbers, with the times as a reason.

    by_rows: the layers that can be of bytes, and whether they round each row by itself. attempt:
    see `Try`; it changes nothing.
    """
    if not measure.TIMED:
        return {}
    times = dict(_times_of(editor, by_rows))
    alone = {step: own.outer + (0.0 if by_rows[step] else _rounding(step.arguments[0]))
             for step, own in times.items()}  # fmt: skip
    doubtful = [step for step in times if alone[step] > times[step].floating]
    if not doubtful:
        return {}
    judge = _Judge(frozenset(by_rows), times, attempt)
    doubtful.sort(key=lambda step: times[step].floating - alone[step])
    left = min((frozenset[Step](), frozenset(doubtful)), key=judge.seconds)
    for step in doubtful:
        left = min((left, left ^ {step}), key=judge.seconds)
    return {step: _words(times[step].floating, alone[step]) for step in doubtful if step in left}


def _words(floating: float, of_bytes: float) -> str:
    return (
        f"floating numbers are faster here: {floating * 1e6:.0f} us, "
        f"integers {of_bytes * 1e6:.0f} us with rounding"
    )


class _Judge:
    """Seconds of the layers of a program, and of rounding, by the layers that stay floating."""

    def __init__(
        self, layers: frozenset[Step], times: Mapping[Step, Times], attempt: Try
    ) -> None:
        self._layers, self._times, self._attempt = layers, times, attempt
        self._known: dict[frozenset[Step], float] = {}

    def seconds(self, left: frozenset[Step]) -> float:
        """With these layers in floating numbers."""
        if left not in self._known:
            self._known[left] = self._seconds(left)
        return self._known[left]

    def _seconds(self, left: frozenset[Step]) -> float:
        steps, by_panels = self._attempt(self._layers - left)
        total = sum(self._times[step].floating for step in left)
        for step in steps.steps:
            if step.target == QUANTIZE:
                total += _rounding(step.arguments[0])
            elif step.target in RESULT:
                own = self._times.get(by_panels.get(step.arguments[PANELS]))  # type: ignore[arg-type]
                is_inner = step.arguments[RESULT[step.target]] in ('"int8"', '"uint8"')
                total += 0.0 if own is None else own.inner if is_inner else own.outer
        return total


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
    return Times(best, own[1] - rounding, own[0] - rounding)


class _CallOfBytes(Call):
    """A linear layer of bytes, behind the rounding of what it takes unless it does that itself."""

    def of(self, x: Value) -> list[Step]:
        steps: list[Step] = []
        if self.arguments[0] != "none":
            rounded = Value()
            words = [repr(SCALE), str(ZERO_POINT), '"uint8"']
            steps, x = [Step(QUANTIZE, [x, *words], [rounded])], rounded
        return [*steps, *super().of(x)]


def _by_rows(weight: Tensor) -> Call:
    return _call_of_bytes(weight, ["none", "0"], _floating(weight.dtype))


def _rounded(weight: Tensor) -> Call:
    return _call_of_bytes(weight, [Some(repr(SCALE)), str(ZERO_POINT)], _floating(weight.dtype))


def _rounded_to_bytes(weight: Tensor) -> Call:
    result = ['"uint8"', Some(repr(SCALE)), str(ZERO_POINT)]
    return _call_of_bytes(weight, [Some(repr(SCALE)), str(ZERO_POINT)], result)


def _floating(dtype: torch.dtype) -> list[Any]:
    return [f'"{dtype}"'.replace("torch.", ""), "none", "0"]


def _call_of_bytes(weight: Tensor, taken: list[Any], result: list[Any]) -> Call:
    values = [Value() for _ in range(4)]
    outputs = weight.shape[0]
    scales = torch.full((outputs,), SCALE)
    given = (*pack_weight(_bytes_of(weight)), padded(scales), torch.zeros(outputs))
    panels, sums, factors, bias = values
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
        lies = torch.empty(size, dtype=torch.uint8).movedim(1, -1).contiguous().fill_(ZERO_POINT)
        self._bytes = lies.movedim(-1, 1)
        pads = [each for each in layer.padding for _ in range(2)]
        self._geometry = [*layer.stride], pads, [*layer.dilation], layer.groups
        self._kernel = [*layer.shape[2:]]
        assert len(self._kernel) == dims
        self._panels = self._weights_of_bytes()

    def _weights_of_bytes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        weight = _bytes_of(numbers(*self._layer.shape))
        packed = pack_convolution(weight, torch.full((weight.shape[0],), SCALE), self._layer.groups)
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
    run = torch.ops.oxytorch.quantize_per_tensor.default

    def make() -> Sequence[Callable[[], Tensor]]:
        given = numbers(count).to(dtype)
        return [lambda: run(given, SCALE, ZERO_POINT, "uint8")]

    return seconds_of(("rounding", about(count), dtype), make)[0]
