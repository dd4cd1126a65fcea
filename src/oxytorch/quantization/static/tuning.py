"""`autotune`: which layers stay in floating point so that a model's score is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...core.modes import with_normal_tensors
from ...optimize.sample import SampleInput
from ...rewriting.predecessor import AUTOTUNE, leads_on
from ...rewriting.refusals import check_data, check_evaluation, check_module, check_not_optimized
from ..weight_only import Progress, shown
from .convert import convert
from .errors import Comparison, LayerError, decibels, int8_share
from .prepare import Int8StaticActivationInt8Weight, prepare, recipe_of
from .recipe import Recipe
from .tuning_file import Known, data_identity, model_identity, opened

_Model = TypeVar("_Model", bound=nn.Module)

COMPARED = 32
"""Inputs of which the errors of layers are taken: the first ones."""
OBSERVERS = ("minmax", "percentile", "mse")
"""What decides the ranges that are compared layer by layer."""
GAIN = 1.0
"""Decibels by which rows with ranges of their own have to be better than fixed ranges, for a layer
that is too sensitive for these."""
MOST_TRIALS = 24
_AS_GIVEN, _BEST = "ranges by the configuration", "best ranges of each layer, smoothed"
_ROWS = "rows"


@dataclass(frozen=True)
class Trial:
    """One model that was evaluated.

    ranges: where the ranges of activations are from.
    floating, dynamic: the layers that were left in floating point, and rounded row by row.
    int8_share: the part of the products that are of integers.
    score: what `evaluate` gave, None where that was no number; loss: against the original.
    seconds: of making the model and evaluating it.
    """

    ranges: str
    floating: tuple[str, ...]
    dynamic: tuple[str, ...]
    int8_share: float
    score: float | None
    loss: float
    passed: bool
    seconds: float


@dataclass
class Autotuned(Generic[_Model]):
    """What `autotune` found. `str(result)` is for people, `as_dict()` for programs.

    model: the converted model.
    recipe: how its layers are computed.
    baseline: the score of the original.
    trials: in the order in which they were made.
    order: all layers with the errors that decide in which order they are left in floating point,
        the most sensitive first.
    is_complete: whether the search ended before its trials did.
    """

    model: _Model
    recipe: Recipe
    baseline: float
    max_loss: float
    is_absolute: bool
    trials: list[Trial] = field(default_factory=list)
    order: list[LayerError] = field(default_factory=list)
    is_complete: bool = True

    @property
    def chosen(self) -> Trial | None:
        """The trial whose recipe was chosen; None where every layer stays in floating point."""
        layers = {name: own.compute for name, own in self.recipe.layers.items() if not own.why}
        floating = {name for name, compute in layers.items() if compute == "float"}
        dynamic = {name for name, compute in layers.items() if compute == "dynamic"}
        passed = [t for t in self.trials if t.passed]
        same = (t for t in passed if {*t.floating} == floating and {*t.dynamic} == dynamic)
        return max(same, key=lambda t: t.int8_share, default=None)

    def as_dict(self) -> dict[str, Any]:
        """All but the model and the recipe as plain data."""
        names = ("baseline", "max_loss", "is_absolute", "is_complete")
        return {
            **{name: getattr(self, name) for name in names},
            "trials": [asdict(each) for each in self.trials],
            "order": [asdict(each) for each in self.order],
        }

    def __str__(self) -> str:
        limit = f"{self.max_loss:g}" if self.is_absolute else f"{self.max_loss:.2%}"
        lines = [
            f"oxytorch.quantization.autotune: {self.recipe.model}, {len(self.trials)} trials, "
            f"score {self.baseline:.6g} of the original, loss of at most {limit}",
            "  trial  loss        integers  floating  dynamic  ranges",
        ]
        for number, each in enumerate(self.trials, 1):
            mark = "*" if each is self.chosen else " "
            loss = f"{each.loss:.6g}" if self.is_absolute else f"{each.loss:.3%}"
            lines.append(
                f"{mark} {number:>5}  {loss:<10}  {each.int8_share:>8.1%}  "
                f"{len(each.floating):>8}  {len(each.dynamic):>7}  {each.ranges}"
            )
        worst = ", ".join(f"{e.module} ({decibels(e.sqnr)})" for e in self.order[:5])
        lines.append(f"  most sensitive, by the SQNR of each layer alone: {worst}")
        if self.chosen is None:
            lines.append("  no trial is good enough: every layer stays in floating point")
        if not self.is_complete:
            lines.append("  the trials were used up: more of them may leave fewer layers")
        return "\n".join(lines)


@leads_on("autotune", AUTOTUNE)
@with_normal_tensors
def autotune(
    model: _Model,
    calibration_data: Iterable[Any],
    evaluate: Callable[[nn.Module], float],
    max_loss: float = 0.01,
    *,
    absolute: bool = False,
    config: Int8StaticActivationInt8Weight | None = None,
    dtype: torch.dtype | None = None,
    most_trials: int = MOST_TRIALS,
    path: str | Path | None = None,
    progress: bool | Progress = False,
) -> Autotuned[_Model]:
    """Find which layers stay in floating point so that a model loses little when it is quantized.

    model, calibration_data, dtype: as in `quantize`. The data are read once and kept.
    evaluate: gives the score of a model that it is given: a number, higher is better. It is called
        with the original first, and must give the same for the same model, up to less than
        max_loss.
    max_loss: how much lower the score may be, as a part of the original's.
    absolute: max_loss is a difference of scores.
    config: of the first trial; None is `Int8StaticActivationInt8Weight()`.
    most_trials: calls of `evaluate` for quantized models.
    path: of a JSON file that is written after each trial. If it exists, what is known there is not
        done again: call with the same arguments after an interrupt. max_loss may be another one.
    progress: as in `quantize`, of trials.

    The order of trials: (1) all layers in integers; (2) all with the ranges, of several observers
    and smoothed, that have the least error layer by layer; (3) with the 1, 2, 4 ... most sensitive
    layers in floating point, then by bisection with the fewest that are enough; (4) these
    layers rounded row by row instead, as many of them as are good enough. The sensitivity of a
    layer is the error of its output over the first 32 inputs when only this layer multiplies
    integers: see `report`. It costs a pass over these inputs, not a trial for each layer.

    Raises TypeError or ValueError if an argument does not fit, the model cannot be captured, the
    score is not a number, or the file is of another model or other data.
    """
    config = config or Int8StaticActivationInt8Weight()
    data = _checked(model, calibration_data, evaluate, max_loss, absolute, most_trials, config)
    identity = {
        "model": model_identity(model),
        "calibration_data": data_identity(data),
        "settings": f"{config}, dtype={dtype}",
    }
    known = opened(path, identity)
    limits = _Limits(max_loss, absolute, most_trials)
    return _Tuner(model, data, evaluate, limits, config, dtype, known, shown(progress)).tuned()


@dataclass(frozen=True)
class _Limits:
    """What `autotune` may lose and do, in its words."""

    max_loss: float
    absolute: bool
    most_trials: int


class _Tuner(Generic[_Model]):
    """One search."""

    def __init__(
        self,
        model: _Model,
        data: Sequence[Any],
        evaluate: Callable[[nn.Module], float],
        limits: _Limits,
        config: Int8StaticActivationInt8Weight,
        dtype: torch.dtype | None,
        known: Known,
        show: Progress,
    ) -> None:
        self._model, self._data, self._evaluate = model, data, evaluate
        self._limits, self._config, self._dtype = limits, config, dtype
        self._known, self._show = known, show
        self._trials: list[Trial] = []
        self._last: tuple[Recipe, _Model] | None = None
        self._is_complete = True

    def tuned(self) -> Autotuned[_Model]:
        """Search."""
        baseline = self._baseline()
        recipe = self._recipe(_AS_GIVEN, self._config)
        errors = self._errors(_AS_GIVEN, recipe)
        name, first = _AS_GIVEN, self._tried(recipe, _AS_GIVEN, errors)
        assert first is not None  # there is one trial at least
        if not first.passed:
            best, best_errors = self._best_ranges(recipe, errors)
            if best != recipe:
                second = self._tried(best, _BEST, best_errors)
                if second is not None and _score(second) >= _score(first):
                    name, recipe, errors, first = _BEST, best, best_errors, second
        if not first.passed:
            recipe = self._with_floating(recipe, name, errors)
        self._show(len(self._trials), len(self._trials), "")
        if self._last is None or self._last[0] != recipe:
            self._last = recipe, self._converted(recipe)
        model = self._last[1]
        return Autotuned(
            model, recipe_of(model), baseline, self._limits.max_loss, self._limits.absolute,
            self._trials, errors, self._is_complete,
        )  # fmt: skip

    def _baseline(self) -> float:
        if self._known.baseline is None:
            self._show(0, self._limits.most_trials, "the original")
            found = self._scored(self._model)
            if found is None:
                raise ValueError(
                    "autotune: expected evaluate to give a finite number for the original model, "
                    "got NaN or infinity"
                )
            self._known.baseline = found
            self._known.save()
        if self._known.baseline == 0 and not self._limits.absolute:
            raise ValueError(
                "autotune: expected a score of the original model other than 0 for a relative "
                "max_loss, got 0; pass absolute=True"
            )
        return self._known.baseline

    def _scored(self, model: nn.Module) -> float | None:
        found = self._evaluate(model)
        try:
            score = float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"autotune: expected evaluate to return a number, got {type(found).__name__}"
            ) from error
        return score if math.isfinite(score) else None

    def _recipe(self, name: str, config: Int8StaticActivationInt8Weight) -> Recipe:
        """What calibration finds, under a name by which it is known."""
        if name not in self._known.recipes:
            prepared = prepare(self._model, config, self._data[0])
            for each in self._data:
                sample = SampleInput(each)
                sample.given_to(prepared)
            self._known.recipes[name] = recipe_of(prepared)
            self._known.save()
        return self._known.recipes[name]

    def _errors(self, name: str, recipe: Recipe) -> list[LayerError]:
        """The errors of layers, the worst first, under a name by which they are known."""
        if name not in self._known.errors:
            comparison = Comparison(self._model, recipe, "autotune")
            for each in self._data[:COMPARED]:
                sample = SampleInput(each)
                sample.fit(self._model, set())
                comparison.see(sample)
            self._known.errors[name] = comparison.errors()
            self._known.save()
        return self._known.errors[name]

    def _best_ranges(
        self, recipe: Recipe, errors: list[LayerError]
    ) -> tuple[Recipe, list[LayerError]]:
        """The ranges of the least error of each layer, and how large that is."""
        found = [(recipe, errors)]
        for observer in OBSERVERS:
            config = replace(self._config, observer=observer, smooth=True)
            if config != self._config:
                name = f"{observer}, smoothed"
                self._show(len(self._trials), self._limits.most_trials, f"ranges: {name}")
                other = self._recipe(name, config)
                found.append((other, self._errors(name, other)))
        best = _joined(found)
        return best, self._errors(_BEST, best)

    def _with_floating(self, recipe: Recipe, name: str, errors: list[LayerError]) -> Recipe:
        """A recipe with as few of the most sensitive layers in floating point as are enough, and
        some of these rounded row by row if that is good enough."""
        order = [each.module for each in errors if each.compute != "float"]

        def kept(count: int) -> Recipe:
            return _changed(recipe, order[:count], "float")

        def is_enough(count: int) -> bool:
            trial = self._tried(kept(count), name, errors)
            return trial is not None and trial.passed

        count = fewest(len(order), is_enough)
        rows = self._better_by_rows(_changed(recipe, order[:count], "dynamic"), name, errors)
        floating = kept(count)
        if not rows:
            return floating

        def with_rows(left: int) -> Recipe:
            return _changed(floating, rows[left:], "dynamic")

        def is_good(left: int) -> bool:
            trial = self._tried(with_rows(left), name, errors)
            return trial is not None and trial.passed

        return with_rows(0 if is_good(0) else fewest(len(rows), is_good))

    def _better_by_rows(self, recipe: Recipe, name: str, errors: list[LayerError]) -> list[str]:
        """The dynamic layers of a recipe whose errors are smaller so, the largest first."""
        fixed = {each.module: each.sqnr for each in errors}
        key = f"{name}, {_ROWS}: " + ", ".join(
            n for n, own in recipe.layers.items() if own.compute == "dynamic"
        )
        return [
            each.module
            for each in self._errors(key, recipe)
            if each.compute == "dynamic"
            and each.sqnr is not None
            and each.sqnr >= (fixed[each.module] or 0.0) + GAIN
        ]

    def _tried(self, recipe: Recipe, ranges: str, errors: Sequence[LayerError]) -> Trial | None:
        """The trial of a recipe; None where there were as many as may be."""
        if len(self._trials) >= self._limits.most_trials:
            self._is_complete = False
            return None
        floating, dynamic = (
            tuple(n for n, own in recipe.layers.items() if own.compute == compute and not own.why)
            for compute in ("float", "dynamic")
        )
        key = f"{ranges}; float: {', '.join(floating)}; dynamic: {', '.join(dynamic)}"
        if key not in self._known.scores:
            kept = f"{len(floating)} layers floating, {len(dynamic)} dynamic"
            self._show(len(self._trials), self._limits.most_trials, kept)
            began = time.perf_counter()
            self._last = recipe, self._converted(recipe)
            score = self._scored(self._last[1])
            self._known.scores[key] = score, time.perf_counter() - began
            self._known.save()
        score, seconds = self._known.scores[key]
        loss = self._loss(score)
        share = int8_share(
            [replace(e, compute=recipe.layers[e.module].compute) for e in errors
             if e.module in recipe.layers]
        )  # fmt: skip
        trial = Trial(
            ranges, floating, dynamic, share, score, loss, loss <= self._limits.max_loss, seconds
        )
        self._trials.append(trial)
        return trial

    def _converted(self, recipe: Recipe) -> _Model:
        return convert(self._model, recipe, example_inputs=self._data[0], dtype=self._dtype)

    def _loss(self, score: float | None) -> float:
        baseline = self._known.baseline
        assert baseline is not None
        if score is None:
            return math.inf
        return (baseline - score) / (1.0 if self._limits.absolute else abs(baseline))


def fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least number from 1 on that is enough, if all larger ones are too; `most` is taken to be,
    and is not asked for. Small ones are asked first: 1, 2, 4 ... and then between."""
    low, high, number = 0, most, 1
    while number < most:
        if is_enough(number):
            high = number
            break
        low, number = number, 2 * number
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _score(trial: Trial) -> float:
    return -math.inf if trial.score is None else trial.score


def _changed(recipe: Recipe, names: Iterable[str], compute: str) -> Recipe:
    layers = {n: replace(recipe.layers[n], compute=compute) for n in names}
    return replace(recipe, layers={**recipe.layers, **layers})


def _joined(found: Sequence[tuple[Recipe, Sequence[LayerError]]]) -> Recipe:
    """For each layer, the recipe in which its error is the smallest; layers that take one value are
    smoothed as in that in which the worst of them is the best."""
    first, _ = found[0]
    ratios = [{e.module: _ratio(e) for e in errors} for _, errors in found]

    def best(names: Sequence[str]) -> int:
        return max(range(len(found)), key=lambda n: min(ratios[n].get(m, 0.0) for m in names))

    groups = dict.fromkeys(each.layers for recipe, _ in found for each in recipe.smoothing)
    layers = {name: found[best([name])][0].layers[name] for name in first.layers}
    smoothing = []
    for names in groups:
        recipe, _ = found[best(names)]
        layers.update({name: recipe.layers[name] for name in names})
        smoothing += [each for each in recipe.smoothing if each.layers == names]
    return Recipe(first.model, layers, smoothing, first.only_faster)


def _ratio(error: LayerError) -> float:
    return math.inf if error.sqnr is None else error.sqnr


def _checked(
    model: object,
    data: Iterable[Any],
    evaluate: object,
    max_loss: object,
    absolute: object,
    most_trials: object,
    config: object,
) -> list[Any]:
    """The data in a list. Raises TypeError or ValueError for arguments that do not fit."""
    check_module("autotune", model, scripted=False)
    assert isinstance(model, nn.Module)
    check_not_optimized("autotune", model)
    check_evaluation("autotune", model)
    check_data("autotune", "calibration_data", data)
    if not callable(evaluate):
        raise TypeError(
            "autotune: expected evaluate to be a function of a model that returns a number, got "
            f"a {type(evaluate).__name__}"
        )
    is_number = isinstance(max_loss, int | float) and not isinstance(max_loss, bool)
    if not is_number or not 0 <= max_loss < math.inf:  # type: ignore[operator]
        raise ValueError(f"autotune: expected max_loss of 0 or more, got {max_loss!r}")
    if not isinstance(absolute, bool):
        raise TypeError(f"autotune: expected absolute True or False, got {absolute!r}")
    if type(most_trials) is not int or most_trials < 1:
        raise ValueError(f"autotune: expected most_trials of 1 or more, got {most_trials!r}")
    if not isinstance(config, Int8StaticActivationInt8Weight):
        raise TypeError(
            "autotune: expected config to be Int8StaticActivationInt8Weight(), got a "
            f"{config.__name__ if isinstance(config, type) else type(config).__name__}"
        )
    found = [*data]
    if not found:
        raise ValueError("autotune: expected calibration_data with at least one input, got none")
    return found
