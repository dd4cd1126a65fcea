"""`prepare`: a copy of a model that notes the ranges of what its layers take."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.modes import own_code, with_normal_tensors
from ...graph.errors import CaptureError
from ...graph.forward import OwnSignature
from ...optimize.sample import Sample
from ...program.inputs import ForeignError, form_of_call
from ...program.observed import INPUT, OUTPUT, ObservedProgram
from ...program.outputs import output_tensors
from ...program.recorded import Run
from ...program.tape import recorded_once
from ...rewriting.copies import copied
from ...rewriting.refusals import check_evaluation, check_finite, check_module, check_not_optimized
from .observers import OBSERVERS, Observer, numbers_of
from .recipe import LayerRecipe, Recipe

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
    observer: what decides the range of an activation: "minmax" (all values), "moving_average" (of
        each batch's least and largest value), "percentile" (99.99 % of the values), "mse" (least
        squared error) or "kl" (least Kullback-Leibler divergence of the histograms).

    Raises TypeError or ValueError for other values.
    """

    symmetric: bool = False
    observer: str = "minmax"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"{name}: expected symmetric True or False, got {self.symmetric!r}")
        if self.observer not in OBSERVERS:
            raise ValueError(
                f"{name}: expected observer {', '.join(OBSERVERS)}, got {self.observer!r}"
            )


@with_normal_tensors
def prepare(model: _Model, config: Int8StaticActivationInt8Weight, example_inputs: Any) -> _Model:
    """Return a copy of a model that notes the ranges of its activations when it is called.

    model: in evaluation mode, on the CPU, neither optimized nor quantized.
    config: an `Int8StaticActivationInt8Weight`.
    example_inputs: arguments of a call: a tensor, a tuple of positional arguments or a mapping of
        keyword arguments. The model is run on them, which does not count for the ranges.

    Call the result on typical data, as the model itself, then `convert` it. Calls return what the
    model returns, without gradients. Raises TypeError or ValueError if an argument does not fit or
    the model cannot be captured, with the reason.
    """
    return prepared(model, config, example_inputs, "prepare")


def prepared(
    model: _Model, config: Int8StaticActivationInt8Weight, example_inputs: Any, caller: str
) -> _Model:
    """See `prepare`; caller: the public function, with which the text of an error begins."""
    check_preparable(caller, model, config)
    check_evaluation(caller, model)
    result = copied(model, caller)
    sample = Sample(example_inputs)
    sample.fit(result, set())
    calibration = Calibration(result, config, example_inputs)
    try:
        with sample.running(result), torch.no_grad(), own_code():
            calibration.add_form(*sample.call)
    except (CaptureError, ForeignError) as error:
        raise uncapturable(caller, model, error) from error
    result.__dict__["forward"] = calibration
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

    module: the model. config: its. example_inputs: arguments of a call. layers: why each layer
    cannot multiply integers, empty if it can, by name.
    """

    module: nn.Module
    config: Int8StaticActivationInt8Weight
    example_inputs: Any
    layers: dict[str, str]

    def recipe(self) -> Recipe:
        """How the layers are computed by what was seen so far. Raises ValueError before a call."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give the modules their own forwards back."""
        raise NotImplementedError


class Calibration(OwnSignature, Observations):
    """Stands in for the forward of a prepared model: its own code, and a look at what layers take.

    calls: those that were seen.
    """

    def __init__(
        self, module: nn.Module, config: Int8StaticActivationInt8Weight, example_inputs: Any
    ) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward")
        self.config = config
        self.example_inputs = example_inputs
        self.calls = 0
        self._observers: dict[str, Observer] = {}
        self._forms: dict[Hashable, list[ObservedProgram]] = {}
        self.layers = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), own_code():
            value = self._own(*args, **kwargs)
            try:
                self._see(self._values(args, kwargs))
            except (CaptureError, ForeignError) as error:
                raise ValueError(
                    f"calibration: a call of this form cannot be captured: {error}; calibrate with "
                    "others"
                ) from error
        self.calls += 1
        return value

    def leave(self) -> None:
        """Give the module its own forward back."""
        if self.inner is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.inner

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_forms": {}}  # programs are made again where they are needed

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        form, tensors = form_of_call(args, kwargs)
        for program in self._forms.get(form, ()):
            found = program(tensors)
            if found is not None:
                return found
        found = self.add_form(args, kwargs)(tensors)
        if found is None:
            raise CaptureError("its code reads other values when it runs again")
        return found

    def add_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedProgram:
        """Record a call of a further form. Raises CaptureError."""
        form, run = recorded_call(self._own, args, kwargs)
        program = ObservedProgram(run, names_of(self.module))
        self._forms.setdefault(form, []).append(program)
        self.layers.update({**program.left, **dict.fromkeys(program.layers, "")})
        return program

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

    def recipe(self) -> Recipe:
        """How the layers are computed by what was seen so far. Raises ValueError before a call."""
        if not self.calls:
            raise ValueError(
                "convert: expected a prepared model that was called on data, got one that saw "
                "none; call it on typical inputs first"
            )
        layers = {}
        for name, why in self.layers.items():
            input, output = (self._numbers(name + end) for end in (INPUT, OUTPUT))
            is_static = not why and input is not None
            own = LayerRecipe("static" if is_static else "float", input, output, why)
            layers[name] = own
        return Recipe(type(self.module).__name__, layers)

    def _numbers(self, name: str) -> Any:
        observer = self._observers.get(name)
        if observer is None or not observer.count:
            return None
        return numbers_of(*observer.range(), self.config.symmetric)


def recorded_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Hashable, Run]:
    """The form of a call, and the record of it. Raises CaptureError."""
    form, tensors = form_of_call(args, kwargs)
    _, recording = recorded_once(lambda: function(*args, **kwargs), output_tensors, tensors)
    if isinstance(recording, CaptureError):
        raise recording
    return form, Run(recording, tensors)


def names_of(module: nn.Module) -> dict[int, str]:
    """The names of a module's parameters, by their identities; a shared one has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


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
