"""`convert`: a model whose layers multiply bytes; `quantize`: all in one call."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Iterable, Sequence, Sized
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ...core.modes import with_normal_tensors
from ...graph.errors import CaptureError
from ...graph.state import random_unmoved
from ...optimize import explain, optimize_in_place, tune, undo
from ...optimize.context import OptimizeContext
from ...optimize.sample import SampleInput
from ...program.eligible import is_special
from ...program.families import Programs
from ...program.inputs import ModuleCall
from ...program.passes.quantized_layers import Layers, Quantized
from ...program.passes.recurrent import SLOWER
from ...program.replay import Replay
from ...rewriting import measure, turns
from ...rewriting.changes import forwards_set
from ...rewriting.copies import InPlace, Separation, copied
from ...rewriting.measure import steady_heap
from ...rewriting.memory import nbytes
from ...rewriting.predecessor import CONVERT, QUANTIZE, leads_on
from ...rewriting.refusals import (
    check_data,
    check_evaluation,
    check_module,
    check_not_optimized,
    names_in,
)
from ..weight_only import Progress, shown
from .prepare import (
    OTHERWISE,
    Calibration,
    Int8StaticActivationInt8Weight,
    Observations,
    calibration_of,
    prepared,
    uncapturable,
)
from .recipe import ALIKE, Recipe
from .runs import names_of

_Model = TypeVar("_Model", bound=nn.Module)


TRACED = (
    "torch.jit.trace records a quantized model in floating point; call what oxytorch.quantize or "
    "quantization.convert returned itself, without trace and freeze, or write it with oxytorch.save"
)


class QuantizedReplay(Replay):
    """Stands in for a model's forward: programs whose layers multiply bytes.

    recipe: how layers are computed. A program is made at the first call with each input signature.
    """

    layers: Layers

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.layers = recipe.chosen()
        self._timed: dict[str, str] = {}  # what `Quantization.slower` says
        self._pays: dict[str, bool] = {}
        super().__init__(module)

    def _new_builder(self) -> Programs:
        names = partial(names_of, self.module)
        return Programs(Quantized(self.recipe.chosen(), names, self._timed, self._pays))

    @property
    def slower(self) -> dict[str, str]:
        """Why layers that are of bytes seemed slower so, by name."""
        return {name: why for name, why in self._timed.items() if why}

    def again(self, recipe: Recipe) -> QuantizedReplay:
        """What stands in for the same module by another recipe. It has no program yet."""
        made = copy.copy(self)
        made.recipe, made.layers, made._timed, made._pays = recipe, recipe.chosen(), {}, {}
        made._start()
        return made

    def take_over(self, other: QuantizedReplay) -> None:
        """Run the programs of another one of the same module."""
        vars(self).update(vars(other))

    def settle(self) -> None:
        """Keep what the times of the first program decided, for those of other sizes."""
        if self._timed or self._pays:
            floating = [name for name, pays in self._pays.items() if not pays]
            self.recipe = self.recipe.with_slower(dict.fromkeys(floating, SLOWER))
            self.layers = self.recipe.chosen()

    def _run_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._get_tracing_state() is not None:
            warnings.warn(TRACED, stacklevel=2)
        return super()._run_stock(args, kwargs)

    def _run_new(self, call: ModuleCall) -> Any:
        form = call.form
        if form in self._refused or is_special(self.module):
            return self.forward(*call.args, **call.kwargs)
        if self._programs and form not in self._programs and self._may_try():
            self._shared(call)  # of which a proof for further sizes is tried
            if self._programs.get(form):
                return self(*call.args, **call.kwargs)
        try:
            self.prepare(call.args, call.kwargs)
        except CaptureError as error:
            self._refused[form] = str(error)
            return self.forward(*call.args, **call.kwargs)
        return self(*call.args, **call.kwargs)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("recipe", "layers", "_timed", "_pays")}
        return {**super().__getstate__(), **own}


@leads_on("convert", CONVERT)
@with_normal_tensors
def convert(
    model: _Model,
    recipe: Recipe | None = None,
    *,
    example_inputs: Any = None,
    dtype: torch.dtype | None = None,
) -> _Model:
    """Return a copy of a model whose linear layers and convolutions multiply 8-bit integers.

    model: what `prepare` returned, after calls on typical data; what `prepare_qat` returned, after
        training; or, with a recipe, a model in evaluation mode, on the CPU, neither optimized nor
        quantized.
    recipe: how each layer is computed; None: as `recipe_of(model)` says.
    example_inputs: arguments of a call, as in `prepare`; None: those given there.
    dtype: torch.bfloat16 or torch.float16: of what has no 8-bit form, and of weights, which are
        rounded to it as by `optimize`. None keeps dtypes.

    The result keeps the model's class, names and weights. In plain inference it runs a program
    whose integers follow writes to the weights; where gradients can be requested, and under
    autocast, tracing and compiling, the model's own code runs on its own weights, without
    quantization. `explain` returns the report, `undo` the original model; `oxytorch.save` writes a
    file.

    Raises TypeError or ValueError if an argument does not fit, the recipe names layers that the
    model does not have, or the model cannot be captured, with the reason.
    """
    check_module("convert", model, scripted=False)
    calibration = calibration_of(model)
    _check_arguments(model, calibration, recipe, example_inputs, dtype)
    check_not_optimized("convert", model)
    check_evaluation("convert", model)
    if calibration is None:
        config = Int8StaticActivationInt8Weight()
        model = prepared(model, config, example_inputs, "convert")
        calibration = calibration_of(model)
    assert calibration is not None
    if recipe is None:
        recipe = calibration.recipe()
        _warn_of_constants(recipe)
    _check_names(calibration, recipe)
    if example_inputs is None:
        example_inputs = calibration.example_inputs
    return _converted(model, recipe, example_inputs, dtype)


def _check_arguments(
    model: nn.Module, calibration: object, recipe: Any, example_inputs: Any, dtype: Any
) -> None:
    if recipe is None and calibration is None:
        raise ValueError(
            "convert: expected a model that oxytorch.quantization.prepare returned, or a recipe, "
            f"got a {type(model).__name__} without"
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"convert: expected recipe to be a Recipe, got a {type(recipe).__name__}")
    if calibration is None and example_inputs is None:
        raise ValueError("convert: expected example_inputs with a model that was not prepared")
    _check_dtype(dtype)


def _check_dtype(dtype: Any) -> None:
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"convert: expected dtype None, torch.bfloat16 or torch.float16, got {dtype}"
        )


def _converted(
    model: _Model,
    recipe: Recipe,
    example_inputs: Any,
    dtype: torch.dtype | None,
    inplace: bool = False,
) -> _Model:
    began = time.perf_counter()
    sample = SampleInput(example_inputs)
    with random_unmoved(), torch.autocast("cpu", enabled=False), steady_heap():
        result, context, replay = _made(model, recipe, sample, dtype, inplace)
        if replay.slower and measure.TIMED:
            _keep_faster(result, replay, sample)
    replay.settle()
    _report(context, replay.recipe)
    report = explain(result)
    report.bytes_after = nbytes(result)
    report.seconds = time.perf_counter() - began
    return result


def _made(
    model: _Model,
    recipe: Recipe,
    sample: SampleInput,
    dtype: torch.dtype | None,
    inplace: bool,
) -> tuple[_Model, OptimizeContext, QuantizedReplay]:
    """A model that computes its layers by a recipe, a copy or itself, and what stands in for it."""
    result = model if inplace else copied(model, "convert")
    calibration = calibration_of(result)
    if calibration is not None:
        calibration.leave()
    sample.fit(result, set() if dtype is None else {dtype})
    separate = InPlace(model) if inplace else Separation(model)
    passes = ("program", "cast") if dtype is not None else ("program",)
    context = optimize_in_place(
        result, dtype, sample, passes, separate, partial(_look, recipe, inplace)
    )
    if not context.is_program:
        entries = context.log.report.entries
        why = next((e.detail for e in entries if e.pass_name == "program"), "")
        if inplace:
            undo(result)
        raise ValueError(f"convert: {type(model).__name__} cannot be captured: {why}; {OTHERWISE}")
    separate(result)
    return result, context, result.__dict__["forward"]


def _keep_faster(model: nn.Module, replay: QuantizedReplay, sample: SampleInput) -> None:
    """Leave the layers that seem slower in integers in floating point, if the whole model is faster
    so. Both programs take the same weights.

    replay: what stands in for the model.
    """
    other = replay.again(replay.recipe.with_slower(replay.slower))
    try:
        with sample.learning(model) as written:
            other.prepare(*sample.call, written)
    except CaptureError as error:
        raise uncapturable("convert", model, error) from error

    def call(forward: QuantizedReplay) -> None:
        with forwards_set({model: forward}):
            sample.given_to(model)

    ratio, *_ = tune.paired_runs(partial(call, replay), partial(call, other), sample, model)
    if ratio <= turns.GAIN:
        replay.take_over(other)


def _look(recipe: Recipe, inplace: bool, context: OptimizeContext) -> None:
    """Say what stands in for the model. No run is recorded, since no regions are made."""
    context.reverts = not inplace  # it was captured by calibration, and two copies are too many
    context.replays = partial(QuantizedReplay, recipe=recipe)
    layers = {name.partition("#")[0] for name in recipe.chosen().by_name}
    context.of_integers = {m for m, path in context.paths.items() if path in layers}


def _report(context: OptimizeContext, recipe: Recipe) -> None:
    """Note how each layer is computed."""
    for name, own in recipe.layers.items():
        if own.compute == "float":
            why = own.why or own.note or "left out by the recipe"
            context.log.skipped("quantize", name, why)
        else:
            context.log.applied("quantize", name, f"8-bit integers, {own.compute}")
    for group in recipe.smoothing:
        if group.factors:
            how = f"input divided by {len(group.factors)} factors, alpha {group.alpha:g}"
            context.log.applied("smooth", ", ".join(group.layers), how)
        else:
            context.log.skipped("smooth", ", ".join(group.layers), group.why)


def _warn_of_constants(recipe: Recipe) -> None:
    """Warn of layers that calibration saw one value of: of dummy data, most likely."""
    names = [name for name, own in recipe.layers.items() if own.note == ALIKE]
    if names:
        warnings.warn(
            f"convert: {ALIKE}, so it stays in floating point: {', '.join(map(repr, names[:5]))}"
            f"{' ...' if len(names) > 5 else ''}; calibrate with typical inputs",
            stacklevel=5,  # beyond the decorators of `convert`
        )


def _check_names(calibration: Observations, recipe: Recipe) -> None:
    """Raise ValueError where a recipe names what the model does not compute, or lacks what it does
    compute."""
    kind, layers = type(calibration.module).__name__, calibration.layers
    for name, own in recipe.layers.items():
        if name not in layers:
            raise ValueError(
                f"convert: expected a recipe for this model, a {kind}, got one for a "
                f"{recipe.model} with layer {name!r}, which is no layer that it runs and that can "
                "be of integers"
            )
        if layers[name] and own.compute != "float":
            raise ValueError(
                f'convert: expected "float" for layer {name!r} in the recipe, because '
                f"{layers[name]}, got {own.compute!r}"
            )
    missing = [name for name in layers if name not in recipe.layers]
    if missing:
        raise ValueError(
            f"convert: expected a recipe with all layers of this model, a {kind}, got one for a "
            f"{recipe.model} without {', '.join(map(repr, missing[:5]))}"
            f"{' ...' if len(missing) > 5 else ''}; to leave a layer in floating point, give it "
            '"compute": "float" there'
        )
    for group in recipe.smoothing:
        why = calibration.why_not_smoothed(group)
        if group.factors and why:
            raise ValueError(
                f"convert: expected a recipe whose smoothing fits this model, a {kind}, got "
                f"factors for {', '.join(group.layers)}: {why}"
            )


@leads_on("quantize", QUANTIZE)
@with_normal_tensors
def quantize(
    model: _Model,
    calibration_data: Iterable[Any],
    config: Int8StaticActivationInt8Weight | None = None,
    *,
    keep: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    inplace: bool = False,
    progress: bool | Progress = False,
) -> _Model:
    """Return a copy of a model whose linear layers and convolutions multiply 8-bit integers.

    model: in evaluation mode, on the CPU, neither optimized nor quantized.
    calibration_data: arguments of calls: tensors, tuples of positional arguments or mappings of
        keyword arguments. The model is run on each, to find the ranges of its activations; 32 to
        500 typical ones are enough. The first one is the example of `prepare`.
    config: how ranges are chosen. None is `Int8StaticActivationInt8Weight()`.
    keep: layers that stay in floating point: paths of layers or of modules with layers below them,
        and patterns with *.
    dtype: of what is not computed with integers, as in `convert`. None keeps dtypes.
    inplace: change `model` itself instead of a copy, which takes less memory: with a dtype its
        weights are replaced by narrower ones as soon as calibration is done.
    progress: True prints a line to standard error; a callable receives the number of finished
        calls, of all (0 where that is not known), and "".

    This is `prepare`, a call for each input, and `convert`. It raises what these raise, and
    ValueError if calibration_data is empty, or tells no layer's range, and if a name in keep fits
    no module.
    """
    _check_dtype(dtype)
    check_data("quantize", "calibration_data", calibration_data)
    config, kept = config or Int8StaticActivationInt8Weight(), names_in("quantize", "keep", keep)
    watching = _calibrated(model, calibration_data, config, kept, shown(progress))
    calibration = calibration_of(watching)
    assert isinstance(calibration, Calibration)
    why = calibration.why_nothing()
    if why:
        raise ValueError(
            f"quantize: expected calibration_data of typical inputs, got a model {why}; pass 32 to "
            "500 typical inputs"
        )
    recipe = calibration.recipe()
    for name in _first_paths(watching, kept):
        recipe = recipe.set(name, "float") if recipe.has(name) else recipe
    _warn_of_constants(recipe)
    calibration.forget_programs()  # which hold what folds made of weights
    if not inplace:
        return convert(watching, recipe, dtype=dtype)
    example_inputs = calibration.example_inputs
    del watching, calibration  # which share the memory of the weights, in cycles
    gc.collect()
    return _converted(model, recipe, example_inputs, dtype, inplace=True)


def _check_kept(watching: nn.Module, keep: Sequence[str]) -> None:
    """Raise ValueError for a name that fits neither a layer nor a module."""
    calibration = calibration_of(watching)
    assert calibration is not None
    modules = watching.named_modules(remove_duplicate=False)
    paths = [*calibration.layers, *(path for path, _ in modules if path)]
    for name in keep:
        if not any(fnmatchcase(path, name) for path in paths):
            raise ValueError(
                f"quantize: expected keep to name layers, modules or patterns, got {name!r}, which "
                f"fits none; layers are {', '.join([*calibration.layers][:5])} ..."
            )


def _first_paths(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of modules, and the first paths of those that the names fit by another path."""
    first = {module: path for path, module in model.named_modules()}
    patterns = [pattern for name in names for pattern in (name, f"{name}.*")]
    others = [
        first[module]
        for path, module in model.named_modules(remove_duplicate=False)
        if path != first[module] and any(fnmatchcase(path, each) for each in patterns)
    ]
    return [*names, *others]


def _calibrated(
    model: _Model,
    calibration_data: Iterable[Any],
    config: Int8StaticActivationInt8Weight,
    keep: Sequence[str],
    show: Progress,
) -> _Model:
    """A copy of a model that was prepared and has seen the data. Raises ValueError for data of no
    inputs, for inputs that it cannot be called with, and for names in keep that fit no module."""
    watching: _Model | None = None
    count, total = 0, len(calibration_data) if isinstance(calibration_data, Sized) else 0
    for data in calibration_data:
        if watching is None:
            watching = prepared(model, config, data, "quantize", "calibration_data[0]")
            _check_kept(watching, keep)
        show(count, total, "")
        sample = SampleInput(data)
        try:
            sample.given_to(watching)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"quantize: the model cannot be called with input {count} of calibration_data, of "
                f"{len(sample.args)} positional and {len(sample.kwargs)} keyword arguments: {error}"
            ) from error
        count += 1
    if watching is None:
        raise ValueError("quantize: expected calibration_data with at least one input, got none")
    show(count, count, "")
    return watching
