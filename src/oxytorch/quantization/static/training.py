"""Quantization-aware training: `prepare_qat`, any optimizer's steps, `convert`."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
from torch import nn

from ...core.modes import own_code, with_normal_tensors
from ...graph.errors import CaptureError
from ...optimize.sample import SampleInput
from ...program import passes
from ...program.inputs import ForeignError
from ...program.observed import INPUT, OUTPUT
from ...program.passes.places import Place
from ...program.passes.quantized_layers import Numbers, Smoothing, named
from ...rewriting.changes import AttributeSet
from ...rewriting.copies import Separation, copied
from ...rewriting.refusals import attached, check_module
from .fake import CLAMPS, FakeLayer, FakeModel, FakeNorm, Range, Shared
from .observers import OBSERVERS
from .prepare import (
    TRAINING,
    Int8StaticActivationInt8Weight,
    Observations,
    calibration_of,
    check_preparable,
    uncapturable,
)
from .recipe import LayerRecipe, Recipe
from .runs import recorded_call

_Model = TypeVar("_Model", bound=nn.Module)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@with_normal_tensors
def prepare_qat(
    model: _Model,
    config: Int8StaticActivationInt8Weight | None,
    example_inputs: Any,
    *,
    recipe: Recipe | None = None,
) -> _Model:
    """Return a copy of a model that trains with the rounding of the quantized model.

    model: on the CPU, neither optimized nor quantized, in either mode, which the copy keeps.
    config: None is `Int8StaticActivationInt8Weight(observer="moving_average")`.
    example_inputs: as in `prepare`; the model is run on them in evaluation mode.
    recipe: which layers are "float" and "dynamic", and the ranges with which training begins: that
        of a model that was calibrated, or of earlier training. None: all layers that can be.

    The copy keeps class, names, parameters and `state_dict`, and runs its own code, in which linear
    layers and convolutions take rounded activations and weights; gradients pass through rounding.
    Calls in training mode update the ranges of activations, by which calls in either mode round; a
    layer whose range is not known yet does not round its input. A batch normalization after a
    convolution is folded into its weight before that is rounded, with the current statistics.
    `freeze_ranges` and `freeze_batch_norms` stop the updates of ranges and statistics.

    Train it with any optimizer, then `convert(model.eval())` makes the integers that it saw;
    `recipe_of(model)` has the ranges, which no `state_dict` does. Raises TypeError or ValueError
    as `prepare`, and where the recipe names layers that the model does not have.
    """
    if config is None:
        config = Int8StaticActivationInt8Weight(observer="moving_average")
    _check_trainable(model, config, recipe)
    result = copied(model, "prepare_qat")
    Separation(model)(result)
    modes = {module: module.training for module in result.modules()}
    sample = SampleInput(example_inputs)
    sample.fit(result, set())
    result.eval()
    try:
        with sample.running(result), torch.no_grad(), own_code():
            places, left = _places(result, sample)
    except (CaptureError, ForeignError) as error:
        raise uncapturable("prepare_qat", model, error) from error
    training = Training(result, config, example_inputs, places, left)
    training.follow(recipe)
    with sample.running(result), torch.no_grad():
        sample.given_to(result)
        unseen = training.unseen()
    training.leave_out(unseen)
    for module, mode in modes.items():
        module.training = mode
    return result


def _check_trainable(
    model: nn.Module, config: Int8StaticActivationInt8Weight, recipe: Recipe | None
) -> None:
    check_preparable("prepare_qat", model, config)
    if calibration_of(model) is not None:
        raise ValueError(
            "prepare_qat: expected a model as it is, got one that was prepared; give recipe_of(it) "
            "with the model that it was made of"
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"prepare_qat: expected recipe to be a Recipe, got {type(recipe).__name__}")
    if config.smooth or (recipe is not None and recipe.chosen().smoothing):
        raise ValueError(
            "prepare_qat: expected a config and a recipe without smoothing, as training adapts the "
            "weights itself, got one with"
        )


def _places(model: nn.Module, sample: SampleInput) -> tuple[dict[str, Place], dict[str, str]]:
    _, run = recorded_call(model.__call__, *sample.call)
    steps, _ = run.written()
    lasting = steps.inputs[run.count :]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors}
    return passes.places(steps, lasting, named(lasting, run.externals, names))


def freeze_ranges(model: nn.Module, frozen: bool = True) -> None:
    """Stop updating the ranges of activations while a model from `prepare_qat` trains on.

    frozen: False has them follow the data again. Raises ValueError for another model.
    """
    _training_of(model, "freeze_ranges").shared.ranges = _switch("freeze_ranges", frozen)


def freeze_batch_norms(model: nn.Module, frozen: bool = True) -> None:
    """Make batch normalizations after convolutions use their running statistics, not those of the
    batch, while a model from `prepare_qat` trains on; their weights and biases still train.

    frozen: False has them follow the data again. Raises ValueError for another model.
    """
    _training_of(model, "freeze_batch_norms").shared.norms = _switch("freeze_batch_norms", frozen)


def _switch(caller: str, frozen: bool) -> bool:
    if not isinstance(frozen, bool):
        raise TypeError(f"{caller}: expected frozen to be True or False, got {frozen!r}")
    return frozen


def _training_of(model: nn.Module, caller: str) -> Training:
    check_module(caller, model)
    return attached(caller, model, TRAINING, Training, "oxytorch.quantization.prepare_qat")


class Training(Observations):
    """Fake quantization of the layers of a model, which it puts in place of their forwards.

    places, left: of `program.passes.places`.
    shared: what is frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Int8StaticActivationInt8Weight,
        example_inputs: Any,
        places: dict[str, Place],
        left: dict[str, str],
    ) -> None:
        self.module, self.config, self.example_inputs = module, config, example_inputs
        self.shared = Shared(config.symmetric)
        self.layers = {**left}
        self._fakes: dict[str, FakeLayer] = {}
        self._changes: dict[str, list[AttributeSet]] = {}
        self._model_change: AttributeSet | None = None
        uses: dict[str, list[str]] = {}
        self._norm_uses = Counter(place.norm for place in places.values())
        for name in places:
            uses.setdefault(name.partition("#")[0], []).append(name)
        for name, all_names in uses.items():
            why = self._why_not(name, [places[each] for each in all_names])
            self.layers.update(dict.fromkeys(all_names, why))
            if not why:
                self._add(name, places[name])
        module.__dict__[TRAINING] = self
        if any(fake.place.is_added for fake in self._fakes.values()):
            self._model_change = AttributeSet(module, "forward", FakeModel(module))

    def why_not_smoothed(self, own: Smoothing) -> str:
        return "the layers were trained without factors"

    def _why_not(self, name: str, places: list[Place]) -> str:
        """Why a layer cannot train with fake quantization; empty if it can."""
        module = self._module(name)
        forward = type(module).forward
        is_plain = forward is nn.Linear.forward or any(
            isinstance(module, kind) and forward is kind.forward for kind in _CONVOLUTIONS
        )
        if not is_plain or "forward" in module.__dict__:
            return "its code is not that of a layer of torch.nn, into which training cannot look"
        if len(places) > 1 and any(place.norm for place in places):
            return "its weight is taken several times, with a batch normalization"
        norm = places[0].norm
        if not norm:
            return ""
        if self._norm_uses[norm] > 1:
            return "its batch normalization is that of several layers"
        found = self.module.get_submodule(norm)
        is_plain = type(found).forward is nn.modules.batchnorm._BatchNorm.forward
        if not is_plain or "forward" in found.__dict__:
            return "the code of its batch normalization is not torch's"
        return ""

    def _module(self, name: str) -> nn.Module:
        """The module that has a layer's weight: the model itself, if it is a layer."""
        own = dict(self.module.named_parameters(recurse=False))
        return self.module if name in own else self.module.get_submodule(name)

    def _add(self, name: str, place: Place) -> None:
        module = self._module(name)
        fake = FakeLayer(module, place, "static", self.shared)
        fake.input = self._range(name + INPUT)
        if place.gives and place.activation in CLAMPS:
            fake.output = self._range(name + OUTPUT)
        self._fakes[name] = fake
        self._changes[name] = [AttributeSet(module, "forward", fake)]
        if place.norm:
            fake.norm = self.module.get_submodule(place.norm)
            change = AttributeSet(fake.norm, "forward", FakeNorm(fake.norm, fake))
            self._changes[name].append(change)

    def _range(self, name: str) -> Range:
        return Range(name, OBSERVERS[self.config.observer](), self.shared)

    def follow(self, recipe: Recipe | None) -> None:
        """Compute as a recipe says. Raises ValueError where it names what the model lacks."""
        for name, own in ({} if recipe is None else recipe.layers).items():
            if name not in self.layers:
                raise ValueError(
                    "prepare_qat: expected a recipe for this model, a "
                    f"{type(self.module).__name__}, got one for a {recipe and recipe.model} with "
                    f"layer {name!r}, which is no linear layer or convolution that it runs"
                )
            if own.compute != "float" and self.layers[name]:
                raise ValueError(
                    f'prepare_qat: expected "float" for layer {name!r} in the recipe, because '
                    f"{self.layers[name]}, got {own.compute!r}"
                )
            fake = self._fakes.get(name)
            if fake is None:
                continue
            if own.compute == "float":
                self._leave(name, own.why or "left out by the recipe")
                continue
            fake.compute = own.compute
            for point, numbers in ((fake.input, own.input), (fake.output, own.output)):
                if point is not None and numbers is not None:
                    _begin(point, numbers)

    def unseen(self) -> list[str]:
        """The layers that never ran as modules."""
        return [name for name, fake in self._fakes.items() if not fake.calls]

    def leave_out(self, unseen: list[str]) -> None:
        """Leave layers that do not run as modules."""
        for name in unseen:
            self._leave(name, "other code takes its weight, into which training cannot look")

    def _leave(self, name: str, why: str) -> None:
        del self._fakes[name]
        for change in self._changes.pop(name):
            change.undo({})
        for each in self.layers:
            if each.partition("#")[0] == name:
                self.layers[each] = why

    def leave(self) -> None:
        if self._model_change is not None:
            self._model_change.undo({})
        for changes in self._changes.values():
            for change in changes:
                change.undo({})
        del self.module.__dict__[TRAINING]

    def recipe(self) -> Recipe:
        """How the layers are computed by the present ranges: as they were trained, also where
        floating point is faster. Raises ValueError without any range."""
        layers = {}
        for name, why in self.layers.items():
            fake = self._fakes.get(name.partition("#")[0])
            own = LayerRecipe("float", why=why)
            if fake is not None:
                input, output = map(_numbers, (fake.input, fake.output))
                compute = "float" if fake.compute == "static" and input is None else fake.compute
                own = LayerRecipe(compute, input, output)
            layers[name] = own
        if self._fakes and all(own.compute == "float" for own in layers.values()):
            raise ValueError(
                "convert: expected a model from prepare_qat that was called in training mode, got "
                "one that saw no data; train it first"
            )
        return Recipe(type(self.module).__name__, layers, only_faster=False)


def _numbers(point: Range | None) -> Numbers | None:
    return None if point is None else point.numbers


def _begin(point: Range, numbers: Numbers) -> None:
    """Have a range begin with the bytes of a recipe."""
    limits = torch.iinfo(numbers.torch_dtype)
    ends = ((end - numbers.zero_point) * numbers.scale for end in (limits.min, limits.max))
    point.observer.least, point.observer.most = ends
    point.observer.count, point.numbers = 1, numbers
