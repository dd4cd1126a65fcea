"""`prepare`: a copy of a model that notes the ranges of what its layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.interruption import pass_on_interruption
from ...core.modes import own_code, with_normal_tensors
from ...graph.errors import CaptureError
from ...graph.forward import AroundForward
from ...optimize.sample import SampleInput
from ...program.inputs import ForeignError
from ...program.observed import INPUT, OUTPUT, ObservedProgram
from ...program.passes.quantized import NO_INPUT
from ...program.passes.quantized_layers import Numbers, Smoothing
from ...rewriting.changes import AttributeSet
from ...rewriting.copies import copied
from ...rewriting.predecessor import PREPARE, leads_on
from ...rewriting.refusals import check_evaluation, check_finite, check_module, check_not_optimized
from .observers import OBSERVERS, Observer, numbers_of
from .recipe import ALIKE, UNSEEN, LayerRecipe, Recipe
from .runs import Runs, names_of
from .smoothing import Call, Smoother

_Model = TypeVar("_Model", bound=nn.Module)
OTHERWISE = (
    "oxytorch.quantize_(model, Int8DynamicActivationInt8Weight()) quantizes its linear layers "
    "one by one"
)
"""What is offered for models that cannot be captured."""


@dataclass(frozen=True)
class Int8StaticActivationInt8Weight:
    """Weights of 8 bits with a scale per output channel; activations of 8 bits by fixed ranges.

    symmetric: activations are int8 with zero point 0; False: uint8 with a zero point.
    smooth: also look for factors that divide channels of what layers take, while their weights are
        multiplied (SmoothQuant; for convolutions in a row, equalization of their ranges).
    observer: what decides the range of an activation: "minmax" (all values), "moving_average" (of
        each batch's least and largest value), "percentile" (99.99 % of the values), "mse" (least
        squared error) or "kl" (least Kullback-Leibler divergence of the histograms).
    only_faster: layers stay floating where they are timed as faster so, and the whole model is
        faster with them. False takes all of them.

    Raises TypeError or ValueError for other values.
    """

    symmetric: bool = False
    observer: str = "minmax"
    smooth: bool = False
    only_faster: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("symmetric", "smooth", "only_faster"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected {field} True or False, got {value!r}")
        if self.observer not in OBSERVERS:
            raise ValueError(
                f"{name}: expected observer {', '.join(OBSERVERS)}, got {self.observer!r}"
            )


@leads_on("prepare", PREPARE)
@with_normal_tensors
def prepare(
    model: _Model, config: Int8StaticActivationInt8Weight | None, example_inputs: Any
) -> _Model:
    """Return a copy of a model that notes the ranges of its activations when it is called.

    model: in evaluation mode, on the CPU, neither optimized nor quantized.
    config: None is `Int8StaticActivationInt8Weight()`.
    example_inputs: arguments of a call: a tensor, a tuple of positional arguments or a mapping of
        keyword arguments. The model is run on them, which does not count for the ranges.

    Call the result on typical data, as the model itself, then `convert` it. Calls return what the
    model returns, without gradients. Raises TypeError or ValueError if an argument does not fit or
    the model cannot be captured, with the reason.
    """
    config = Int8StaticActivationInt8Weight() if config is None else config
    return prepared(model, config, example_inputs, "prepare")


def prepared(
    model: _Model,
    config: Int8StaticActivationInt8Weight,
    example_inputs: Any,
    caller: str,
    name: str = "example_inputs",
) -> _Model:
    """See `prepare`; caller: the public function, with which the text of an error begins; name: of
    the argument that holds the inputs."""
    check_preparable(caller, model, config)
    check_evaluation(caller, model)
    result = copied(model, caller)
    sample = SampleInput(example_inputs)
    sample.fit(result, set())
    calibration = Calibration(result, config, example_inputs)
    try:
        with sample.running(result), torch.no_grad(), own_code():
            calibration.add_form(*sample.call)
    except (CaptureError, ForeignError) as error:
        raise uncapturable(caller, model, error) from error
    except Exception as error:
        pass_on_interruption(error)
        if sample.fits(result):
            raise
        raise sample.misfit(result, error, caller, name) from error
    calibration.stand_in()
    return result


def uncapturable(caller: str, model: nn.Module, error: Exception) -> ValueError:
    """The error for a model that cannot be captured."""
    kind = type(model).__name__
    return ValueError(f"{caller}: {kind} cannot be captured: {error}; {OTHERWISE}")


def check_preparable(caller: str, model: nn.Module, config: Int8StaticActivationInt8Weight) -> None:
    """Raise TypeError or ValueError for what cannot be prepared."""
    check_module(caller, model, scripted=False)
    if not isinstance(config, Int8StaticActivationInt8Weight):
        raise TypeError(
            f"{caller}: expected config to be Int8StaticActivationInt8Weight(), got a "
            f"{config.__name__ if isinstance(config, type) else type(config).__name__}"
        )
    check_not_optimized(caller, model)
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu" or tensor.is_meta:
            raise ValueError(
                f"{caller}: expected tensors on the CPU, got {name} on {tensor.device}"
            )
        if tensor.is_floating_point():
            check_finite(caller, name, tensor)


class Observations:
    """What was seen of the activations of a model, which tells how its layers are computed.

    module: the model.
    config: its.
    example_inputs: arguments of a call.
    layers: why each layer cannot multiply integers, empty if it can, by name.
    """

    module: nn.Module
    config: Int8StaticActivationInt8Weight
    example_inputs: Any
    layers: dict[str, str]

    def recipe(self) -> Recipe:
        """How the layers are computed by what was seen so far. Raises ValueError where that says
        nothing of any layer."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give the modules their own forwards back."""
        raise NotImplementedError

    def why_not_smoothed(self, own: Smoothing) -> str:
        """Why the layers of a recipe cannot be smoothed so; empty if they can."""
        raise NotImplementedError


class Calibration(AroundForward, Observations):
    """Stands around the forward of a prepared model, and looks at what layers take.

    calls: those that were seen.
    groups: why what layers take cannot be divided, empty if it can, by the names of all of them.
    """

    def __init__(
        self, module: nn.Module, config: Int8StaticActivationInt8Weight, example_inputs: Any
    ) -> None:
        super().__init__(module)
        self.config = config
        self.example_inputs = example_inputs
        self.calls = 0
        self._observers: dict[str, Observer] = {}
        self._smoothers: dict[tuple[str, ...], Smoother] = {}
        self._smoothed: tuple[int, list[Smoothing]] = (0, [])
        self._runs = self._new_runs()
        self.layers = {}
        self.by_rows: dict[str, None] = {}
        self.groups: dict[tuple[str, ...], str] = {}
        self._channels: dict[tuple[str, ...], int] = {}
        self._shared: dict[str, tuple[str, ...]] = {}
        self._change: AttributeSet | None = None

    def _new_runs(self) -> Runs[ObservedProgram]:
        return Runs(self.forward, lambda run: ObservedProgram(run, names_of(self.module)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), own_code():
            value = self.forward(*args, **kwargs)
            try:
                program, found = self._runs(args, kwargs)
                self._note(program)
                self._see(found)
                if self.config.smooth:
                    self._see_groups(program, found)
            except (CaptureError, ForeignError) as error:
                raise ValueError(
                    f"calibration: a call with these inputs cannot be captured: {error}; calibrate "
                    "with others"
                ) from error
        self.calls += 1
        return value

    def stand_in(self) -> None:
        """Take the place of the module's forward."""
        self._change = AttributeSet(self.module, "forward", self)

    def leave(self) -> None:
        if self._change is not None:
            self._change.undo({})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": None}  # programs are made again where they are needed

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._runs = self._new_runs()

    def forget_programs(self) -> None:
        """Free the programs of the calls that were seen; further calls make them again."""
        self._runs = self._new_runs()

    def add_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedProgram:
        """Record a call of a further form. Raises CaptureError."""
        program = self._runs.add_form(args, kwargs)
        self._note(program)
        return program

    def _note(self, program: ObservedProgram) -> None:
        # A layer that can multiply integers in one call can; others, as of no image, go without.
        left = {name: why for name, why in program.left.items() if self.layers.get(name) != ""}
        self.layers.update({**left, **dict.fromkeys((*program.layers, *program.by_rows), "")})
        self.by_rows.update(dict.fromkeys(program.by_rows))
        self.groups.update({group.layers: group.why for group in program.groups})
        self._shared.update({name: group for group in program.shared for name in group})
        self._channels.update({group.layers: group.channels for group in program.groups})

    def _see(self, found: dict[str, Tensor]) -> None:
        for name, values in found.items():
            if name not in self._observers:
                self._observers[name] = OBSERVERS[self.config.observer]()
            try:
                self._observers[name].see(values)
            except ValueError as error:
                layer, _, end = name.rpartition(".")
                raise ValueError(
                    f"calibration: expected finite values in the {end} of layer {layer}, {error}"
                ) from None

    def _see_groups(self, program: ObservedProgram, found: dict[str, Tensor]) -> None:
        for group in program.groups:
            if group.why:
                continue
            if group.layers not in self._smoothers:
                is_linear = group.calls[0][1] is None
                self._smoothers[group.layers] = Smoother(-1 if is_linear else 1)
            self._smoothers[group.layers].see(found[group.layers[0] + INPUT])

    def recipe(self) -> Recipe:
        why = self.why_nothing()
        if why:
            raise ValueError(
                f"convert: expected a prepared model that was called on typical data, got one {why}"
                "; call it on typical inputs first"
            )
        layers = {name: self._layer(name, why) for name, why in self.layers.items()}
        kind, only_faster = type(self.module).__name__, self.config.only_faster
        return Recipe(kind, layers, self._smoothing(), only_faster)

    def why_nothing(self) -> str:
        """Why nothing is known of any layer that needs a range; empty if something is, or none
        does."""
        if not self.calls:
            return "that saw none"
        may = [name for name, why in self.layers.items() if why in ("", NO_INPUT)]
        notes = {self._layer(name, "").note for name in may if name not in self.by_rows}
        if not notes or "" in notes:
            return ""
        if notes == {UNSEEN}:
            return f"whose layers saw no value in {self.calls} calls, as of empty inputs"
        return f"whose layers saw one value alone in {self.calls} calls, as of zeros"

    def _layer(self, name: str, why: str) -> LayerRecipe:
        """How a layer is computed. why: the reason why it is floating, if it has to be."""
        input, output = (self._numbers(name + end) for end in (INPUT, OUTPUT))
        if why:
            return LayerRecipe("float", input, output, why)
        if name in self.by_rows:
            return LayerRecipe("dynamic", input, output)
        if input is None:
            seen = self._observers.get(name + INPUT)
            note = ALIKE if seen is not None and seen.count else UNSEEN
            return LayerRecipe("float", input, output, note=note)
        return LayerRecipe("static", input, output)

    def _numbers(self, name: str) -> Numbers | None:
        own = self._range(name)
        if own is None:
            return None
        ranges = [own, *filter(None, map(self._range, self._shared.get(name, ())))]
        least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
        if most - least <= MOST_SHARED * (own[1] - own[0]):
            own = least, most
        return numbers_of(*own, self.config.symmetric)

    def _range(self, name: str) -> tuple[float, float] | None:
        """The range of a value, with zero; None where calibration saw none, or one number."""
        observer = self._observers.get(name)
        if observer is None or not observer.count or observer.least == observer.most:
            return None
        least, most = observer.range()
        return min(least, 0.0), max(most, 0.0)

    def _smoothing(self) -> list[Smoothing]:
        """What is divided, and why other inputs are not."""
        if self.config.smooth and self._smoothed[0] != self.calls:
            with torch.no_grad():
                self._smoothed = self.calls, [*map(self._smoothing_of, self.groups)]
        return [*self._smoothed[1]]

    def _smoothing_of(self, layers: tuple[str, ...]) -> Smoothing:
        why, smoother = self.groups[layers], self._smoothers.get(layers)
        if why or smoother is None:
            return Smoothing(layers, why=why or UNSEEN)
        config = self.config
        return smoother.smoothing(layers, self._weights(layers), config.observer, config.symmetric)

    def why_not_smoothed(self, own: Smoothing) -> str:
        if own.layers not in self.groups:
            return "there is no value that these layers take, and no others"
        wanted, given = self._channels[own.layers], len(own.factors)
        if wanted != given:
            return f"it has {wanted} channels, and there are {given} factors"
        return self.groups[own.layers]

    def _weights(self, layers: tuple[str, ...]) -> list[Call]:
        for program in self._runs.programs():
            for group in program.groups:
                if group.layers == layers:
                    return program.weights(group)
        with own_code():  # programs are not copied with a model
            self.add_form(*SampleInput(self.example_inputs).call)
        return self._weights(layers)


MOST_SHARED = 4
"""How many times as wide as its own the range of a value may be that it shares with others whose
elements it has: parts of what a layer gives, or what is concatenated."""
TRAINING = "_oxytorch_training"
"""The attribute of a model that trains with fake quantization, where its observations are."""


def calibration_of(model: nn.Module) -> Observations | None:
    """The observations of a prepared model; None for others."""
    for found in (model.__dict__.get("forward"), model.__dict__.get(TRAINING)):
        if isinstance(found, Observations):
            return found
    return None


def recipe_of(model: nn.Module) -> Recipe:
    """Return the recipe by which `convert` would make a prepared model, or made a converted one.

    Raises ValueError for another model, or a prepared one that saw no data.
    """
    check_module("recipe_of", model)
    found = calibration_of(model)
    if found is not None:
        return found.recipe()
    recipe = getattr(model.__dict__.get("forward"), "recipe", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "recipe_of: expected a model that oxytorch.quantization.prepare or convert returned, "
            f"got a {type(model).__name__} that was neither prepared nor converted"
        )
    return recipe
