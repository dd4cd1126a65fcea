"""Where the layers of a model stand among its other steps, for training that sees their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..program import Some, Step, Steps, Value
from . import convolution, quantized
from .convolution_times import CONVOLUTION
from .editor import Editor, Pass
from .moves import ADDS
from .post_ops import is_activation
from .quantized_layers import Layer, Layers, Numbers, Quantization


@dataclass(frozen=True)
class Place:
    """How a layer of bytes is computed with what stands around it.

    norm: the path of the batch normalization that is folded into its weight; "" if there is none.
    gives: whether what it gives is rounded, because it is added to something else.
    activation: the operator between both.
    is_added: whether what it takes is added to something else as rounded.
    """

    norm: str = ""
    gives: bool = False
    activation: str = ""
    is_added: bool = False


def places_of(
    steps: Steps,
    lasting: Iterable[Value],
    names: Mapping[Value, str],
    before: Iterable[Pass],
    folds: Iterable[Pass],
) -> tuple[dict[str, Place], dict[str, str]]:
    """The places of layers, by name; and why others cannot multiply bytes.

    names: of the values that stand for parameters and buffers.
    before, folds: passes that hold for all weights, and those that fold steps into convolutions.
    """
    editor = Editor(steps, lasting)
    for each in before:
        each(editor)
    norms: dict[str, str] = {}
    if convolution.can_follow_order(editor):
        found = _norms(editor, names)
        for each in folds:
            each(editor)
        kept = {step.results[0] for step in editor.steps.steps if step.target == convolution.NORM}
        norms = {name: norm for name, (norm, result) in found.items() if result not in kept}
    left = quantized.left(editor, names)
    points = quantized.points_of(editor, names)
    places = {
        name: Place(norms.get(name, ""), activation=_activation(editor, step))
        for step, name in quantized.layers_of(editor, names).items()
    }
    return _with_bytes(editor, places, points, names), left


def _norms(editor: Editor, names: Mapping[Value, str]) -> dict[str, tuple[str, Value | None]]:
    """The batch normalization behind each convolution, and what it gives."""
    layers: dict[Step, str] = {}
    counts: dict[str, int] = {}
    for step in editor.steps.steps:
        if step.target == CONVOLUTION:
            name = quantized.name_of(editor, names, step.arguments[1])
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
                layers[step] = name if counts[name] == 1 else f"{name}#{counts[name]}"
    found = {}
    for step in editor.steps.steps:
        if step.target == convolution.NORM and step.arguments[3] in names:
            before = editor.made_by(step.arguments[0], CONVOLUTION)
            if before in layers:
                norm = names[step.arguments[3]].rpartition(".")[0]
                found[layers[before]] = norm, step.results[0]
    return found


def _activation(editor: Editor, step: Step) -> str:
    """The activation behind a layer that alone takes what it gives."""
    (value,) = step.results
    taker = None if value is None else editor.only_taker(value)
    return taker.target if taker is not None and is_activation(taker) else ""


def _with_bytes(
    editor: Editor,
    places: Mapping[str, Place],
    points: Mapping[str, Value],
    names: Mapping[Value, str],
) -> dict[str, Place]:
    """The places, with what is known once all layers multiply bytes: each point has a scale of its
    own, by which it is found again among what layers add."""
    scales = {value: 1 + place / 1024 for place, value in enumerate(dict.fromkeys(points.values()))}
    marks = {name: Numbers(scales[value], 0, "uint8") for name, value in points.items()}
    layers = {name: Layer(marks[f"{name}.input"], marks.get(f"{name}.output")) for name in places}
    quantized.quantize(editor, Quantization(Layers(layers), names))
    added = set()
    for step in editor.steps.steps:
        place = ADDS.get(step.target)
        if place is not None and isinstance(step.arguments[place], Some):
            scale = step.arguments[place].item
            added.add(float(scale))
    taken = {marks[f"{name}.input"].scale for name in places}  # are rounded for these layers
    found = {}
    for name, own in places.items():
        output = marks.get(f"{name}.output")
        gives = output is not None and output.scale in added - taken
        is_added = marks[f"{name}.input"].scale in added
        found[name] = replace(own, gives=gives, is_added=is_added)
    return found
