"""How far layers of 8-bit integers are from what they stand for, and what share of the work is
theirs: as data, as a table, and as a plot."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.modes import own_code, with_normal_tensors
from ...graph.agreement import floating_tensors
from ...graph.errors import CaptureError
from ...optimize.sample import SampleInput
from ...program.inputs import ForeignError
from ...program.observed import ComparedProgram
from ...rewriting.measure import steady_heap
from ...rewriting.refusals import check_data, check_evaluation, check_module, check_not_optimized
from .prepare import recipe_of
from .recipe import Recipe
from .runs import Runs, names_of

ROUNDS, LONGEST = 25, 3.0
"""Calls of each model that are timed, in turns, and the seconds after which no further turn begins:
but there are at least `FEWEST`."""
FEWEST = 3
MOST_BARS = 80
"""Layers of a plot: the worst ones."""


@dataclass(frozen=True)
class LayerError:
    """One layer: how it is computed ("static", "dynamic" or "float"), and how well.

    sqnr: decibels by which the squares of what it gives are larger than those of its error, if it
        alone was computed so; input_sqnr: the same of rounding what it takes. None for "float".
    products: of numbers, that it multiplies in all calls.
    why: why it is "float", if it has to be.
    """

    module: str
    compute: str
    sqnr: float | None
    input_sqnr: float | None
    products: int
    why: str = ""


@dataclass
class ErrorReport:
    """The account of one `report` call. `str(report)` is for people, `as_dict()` for programs.

    layers: the worst first.
    sqnr, cosine: of what the whole model returns, in all calls.
    original_seconds, quantized_seconds: of a call with the first data, None where not asked for.
    """

    model: str
    calls: int
    layers: list[LayerError]
    sqnr: float
    cosine: float
    original_seconds: float | None = None
    quantized_seconds: float | None = None

    @property
    def int8_share(self) -> float:
        """The part of the products of linear and recurrent layers and convolutions that are of
        integers."""
        return int8_share(self.layers)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**asdict(self), "int8_share": self.int8_share}

    def __str__(self) -> str:
        lines = [
            f"oxytorch.quantization.report: {self.model}, {self.calls} calls, SQNR "
            f"{decibels(self.sqnr)}, cosine {self.cosine:.6f}",
            f"  {self.int8_share:.1%} of the products of linear and recurrent layers and "
            "convolutions are of 8-bit integers",
        ]
        if self.original_seconds is not None and self.quantized_seconds is not None:
            lines.append(
                f"  a call takes {self.original_seconds * 1e3:.3f} -> "
                f"{self.quantized_seconds * 1e3:.3f} ms"
            )
        return "\n".join([*lines, *table(self.layers)])

    def plot(self, path: str | Path) -> None:
        """Draw the SQNR of layers, the worst first, into a file; its suffix says in which format.

        Needs matplotlib, and raises ImportError without it. Raises ValueError where no layer
        multiplies integers.
        """
        from .drawing import draw

        draw(self, path)


def int8_share(layers: Sequence[LayerError]) -> float:
    """The part of the products of layers that are of integers; 0 without any."""
    everything = sum(layer.products for layer in layers)
    return sum(each.products for each in layers if each.compute != "float") / max(everything, 1)


def table(layers: Sequence[LayerError]) -> list[str]:
    """Lines of a table of layers, in their order."""
    everything = max(sum(layer.products for layer in layers), 1)
    width = max([5, *(len(layer.module) for layer in layers)])
    lines = [f"  {'layer':<{width}}  compute       SQNR   of input  products"]
    for each in layers:
        share = f"{each.products / everything:.1%}"
        line = (
            f"  {each.module:<{width}}  {each.compute:<7}  {decibels(each.sqnr):>9}  "
            f"{decibels(each.input_sqnr):>9}  {share:>8}  {each.why}"
        )
        lines.append(line.rstrip())
    return lines


def decibels(value: float | None) -> str:
    """A ratio as text."""
    return "-" if value is None else f"{value:.1f} dB"


def ratio(signal: float, error: float) -> float:
    """The ratio of squares in decibels; infinite without an error."""
    if error <= 0:
        return math.inf
    return 10 * math.log10(signal / error) if signal > 0 else -math.inf


class Comparison:
    """The errors of a model's layers if each alone was computed by a recipe, over several calls.

    caller: the public function, with which the text of an error begins.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, caller: str) -> None:
        layers, names = recipe.chosen(), names_of(model)
        self._model = model
        self._recipe = recipe
        self._caller = caller
        self._squares: dict[str, list[float]] = {}
        self._products: dict[str, int] = {}
        self._runs = Runs(model.forward, lambda run: ComparedProgram(run, names, layers))

    def see(self, sample: SampleInput) -> None:
        """Take notice of a call. Raises ValueError where it cannot be captured."""
        try:
            with torch.no_grad(), own_code():
                program, found = self._runs(*sample.call)
        except (CaptureError, ForeignError) as error:
            raise ValueError(
                f"{self._caller}: {type(self._model).__name__} cannot be captured: {error}"
            ) from error
        for name, products in program.products.items():
            self._products[name] = self._products.get(name, 0) + products
        for name, squares in found.items():
            before = self._squares.get(name, [0.0] * len(squares))
            self._squares[name] = [a + b for a, b in zip(before, squares, strict=True)]

    def errors(self) -> list[LayerError]:
        """The layers, the worst first; those in floating point last."""
        found = [self._error(name) for name in self._products]
        return sorted(found, key=lambda each: math.inf if each.sqnr is None else each.sqnr)

    def _error(self, name: str) -> LayerError:
        own, squares = self._recipe.layers.get(name), self._squares.get(name)
        products = self._products[name]
        if own is None or squares is None:
            why = "" if own is None else own.why
            return LayerError(name, "float", None, None, products, why)
        taken, rounding, given, error = squares
        return LayerError(name, own.compute, ratio(given, error), ratio(taken, rounding), products)


class _Whole:
    """Sums over what two models return."""

    def __init__(self) -> None:
        self._squares = [0.0] * 4  # of the original, of the other, of both, of the difference

    def see(self, original: Any, quantized: Any) -> None:
        pairs = zip(floating_tensors(original), floating_tensors(quantized), strict=True)
        for first, second in pairs:
            a, b = first.double().flatten(), second.double().flatten()
            found = (a @ a, b @ b, a @ b, (a - b).square().sum())
            self._squares = [s + float(n) for s, n in zip(self._squares, found, strict=True)]

    @property
    def sqnr(self) -> float:
        return ratio(self._squares[0], self._squares[3])

    @property
    def cosine(self) -> float:
        first, second, both, _ = self._squares
        size = math.sqrt(first * second)
        return both / size if size > 0 else float(first == second)


@with_normal_tensors
def report(
    model: nn.Module, quantized: nn.Module, data: Iterable[Any], *, times: bool = False
) -> ErrorReport:
    """Return the errors of a quantized model, layer by layer and as a whole.

    model: the original, in evaluation mode, neither optimized nor quantized.
    quantized: what `convert` or `quantize` made of it.
    data: arguments of calls, as in `quantize`; a few typical ones are enough. Each is run once by
        the original, once by a program in which layers are also computed as they are in
        `quantized`, and once by `quantized`.
    times: also time calls of both with the first data.

    The error of a layer is its own: it gets the input of the original's layer. It is measured
    before an activation or a sum. Raises TypeError or ValueError if an argument does not fit.
    """
    check_module("report", model, scripted=False)
    check_module("report", quantized, scripted=False)
    check_not_optimized("report", model)
    check_evaluation("report", model)
    recipe = recipe_of(quantized)
    _check_same(model, recipe)
    check_data("report", "data", data)
    comparison, whole, samples = Comparison(model, recipe, "report"), _Whole(), 0
    seconds: tuple[float | None, float | None] = (None, None)
    for each in data:
        sample = SampleInput(each)
        sample.fit(model, set())
        with torch.no_grad():
            whole.see(_called(model, sample), _called(quantized, sample))
        comparison.see(sample)
        if times and not samples:
            seconds = _seconds(sample, model, quantized)
        samples += 1
    if not samples:
        raise ValueError("report: expected data with at least one input, got none")
    return ErrorReport(
        type(model).__name__,
        samples,
        comparison.errors(),
        whole.sqnr,
        whole.cosine,
        *seconds,
    )


def _called(model: nn.Module, sample: SampleInput) -> Any:
    return sample.given_to(model)


def _check_same(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError where a recipe is one of another model."""
    names = {*dict(model.named_modules()), *dict(model.named_parameters())}
    other = next((n for n in recipe.layers if n.partition("#")[0] not in names), None)
    kind = type(model).__name__
    if kind != recipe.model or other is not None:
        what = f"a {recipe.model}" + ("" if other is None else f" with layer {other!r}")
        raise ValueError(f"report: expected the model that was quantized, {what}, got a {kind}")


def _seconds(sample: SampleInput, *models: nn.Module) -> tuple[float, float]:
    """The usual seconds of a call of two models, in turns."""
    taken: list[list[float]] = [[] for _ in models]
    with torch.no_grad(), steady_heap():
        for model in models:
            _called(model, sample)
        began = time.perf_counter()
        for turn in range(ROUNDS):
            if turn >= FEWEST and time.perf_counter() - began > LONGEST:
                break
            for model, own in zip(models, taken, strict=True):
                start = time.perf_counter()
                _called(model, sample)
                own.append(time.perf_counter() - start)
    first, second = map(statistics.median, taken)
    return first, second
