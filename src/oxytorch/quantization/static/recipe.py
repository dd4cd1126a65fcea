"""Recipes: how each layer of a model is computed, as a person reads and edits it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...program.passes.quantized_layers import Layer, Layers, Numbers, Smoothing

FORMAT, VERSION = "oxytorch.recipe", 1
COMPUTE = {
    "static": "activations are rounded to 8 bits by ranges that calibration found",
    "dynamic": "each row of an activation is rounded by its own largest magnitude",
    "float": "the layer is computed in the dtype of the rest of the model",
}
"""How a layer is computed."""
UNSEEN = "calibration saw no input of it"
ALIKE = "calibration saw one value alone in all inputs of it"
"""Why a layer that could multiply bytes does not."""


@dataclass(frozen=True)
class LayerRecipe:
    """How one layer is computed; compute: a key of COMPUTE.

    input, output: the bytes of what it takes, and of what it gives where that is added to something
        else, if calibration saw them.
    why: the reason why it is "float", if it has to be.
    note: what else a reader should know; it changes nothing.
    """

    compute: str
    input: Numbers | None = None
    output: Numbers | None = None
    why: str = ""
    note: str = ""


@dataclass
class Recipe:
    """How the layers of a model are computed.

    model: the class of the model.
    layers: by the path of the module that holds the weight.
    smoothing: what is divided before layers take it; without one, layers take what they took.
    only_faster: whether layers are timed by `convert`, and stay floating where the model is faster
        so.
    """

    model: str
    layers: dict[str, LayerRecipe] = field(default_factory=dict)
    smoothing: list[Smoothing] = field(default_factory=list)
    only_faster: bool = True

    def chosen(self) -> Layers:
        """The layers that multiply bytes."""
        layers = {
            name: Layer(own.input if own.compute == "static" else None, own.output)
            for name, own in self.layers.items()
            if own.compute != "float"
        }
        smoothing = tuple(each for each in self.smoothing if each.factors)
        return Layers(layers, smoothing, self.only_faster)

    def with_slower(self, notes: Mapping[str, str]) -> Recipe:
        """The recipe in which layers stay floating for the reasons that times gave, by name, and
        none is timed again."""
        slower = {
            name: replace(self.layers[name], compute="float", note=note)
            for name, note in notes.items()
        }
        return replace(self, layers={**self.layers, **slower}, only_faster=False)

    def set(self, names: str, compute: str) -> Recipe:
        """A recipe in which layers are computed in another way.

        names: of a layer or of a module with layers below it; * matches anything.
        compute: "static", "dynamic" or "float".

        Raises TypeError where names are no text, and ValueError where no layer has such a name, or
        one cannot be computed so.
        """
        if not isinstance(names, str):
            raise TypeError(
                f"recipe: expected names to be a name or a pattern, got {names!r}; set each"
            )
        if compute not in COMPUTE:
            raise ValueError(f"recipe: expected compute {_listed(COMPUTE)}, got {compute!r}")
        found = [*self._named(names)]
        if not found:
            raise ValueError(
                f"recipe: expected the name of a layer, got {names!r}, which matches none; layers "
                f"are {_listed([*self.layers][:5])} ..."
            )
        changed = {name: _computed(name, self.layers[name], compute) for name in found}
        return replace(self, layers={**self.layers, **changed})

    def has(self, names: str) -> bool:
        """Whether `set` would find layers by these names."""
        return any(True for _ in self._named(names))

    def _named(self, names: str) -> Iterator[str]:
        for name in self.layers:
            own = name.partition("#")[0]
            if any(fnmatchcase(each, p) for each in (name, own) for p in (names, f"{names}.*")):
                yield name

    def __str__(self) -> str:
        width = max(map(len, self.layers), default=0)
        lines = [f"recipe for {self.model}, {len(self.layers)} layers"]
        for name, own in self.layers.items():
            shown = own.why or own.note
            if own.compute == "static" and own.input is not None:
                shown = _shown(own.input)
            lines.append(f"  {name:<{width}}  {own.compute:<7}  {shown}".rstrip())
        for group in self.smoothing:
            how = group.why or f"alpha {group.alpha:g}, {len(group.factors)} factors"
            lines.append(f"  input of {', '.join(group.layers)}: {how}")
        return "\n".join(lines)


def _shown(numbers: Numbers) -> str:
    least, most = (0, 255) if numbers.dtype == "uint8" else (-127, 127)
    ends = (numbers.scale * (end - numbers.zero_point) for end in (least, most))
    return "{:.4g} to {:.4g}".format(*ends)


def _computed(name: str, own: LayerRecipe, compute: str) -> LayerRecipe:
    if compute != "float" and own.why:
        raise ValueError(f'recipe: expected "float" for {name}, because {own.why}, got {compute!r}')
    if compute == "static" and own.input is None:
        raise ValueError(
            f'recipe: expected "dynamic" or "float" for {name}, of which calibration saw no range, '
            "got 'static'"
        )
    return replace(own, compute=compute, note=own.note if compute == own.compute else "")


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe to a JSON file, which a person can read and edit; see `load_recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"save_recipe: expected recipe to be a Recipe, got a {type(recipe).__name__}"
        )
    Path(path).write_text(json.dumps(recipe_data(recipe), indent=2) + "\n")


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON holds it; `recipe_from` reads it."""
    layers = {name: _data(own) for name, own in recipe.layers.items()}
    data = {"format": FORMAT, "version": VERSION, "model": recipe.model, "layers": layers}
    groups = [_smoothing_data(each) for each in recipe.smoothing]
    if not recipe.only_faster:
        data["only_faster"] = False
    return {**data, "smoothing": groups} if groups else data


def _data(own: LayerRecipe) -> dict[str, Any]:
    data: dict[str, Any] = {"compute": own.compute}
    for key in ("input", "output"):
        numbers: Numbers | None = getattr(own, key)
        if numbers is not None:
            data[key] = vars(numbers)
    return data | {key: getattr(own, key) for key in ("why", "note") if getattr(own, key)}


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe that `save_recipe` wrote. Raises ValueError, which names the entry, where the
    file is none."""
    try:
        data = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"load_recipe: expected a JSON file, got {path} ({error})") from error
    return recipe_from(data, str(path))


def recipe_from(data: Any, path: str) -> Recipe:
    """The recipe of what JSON held; path: of the file, for errors. Raises ValueError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'load_recipe: expected "format": "{FORMAT}" in {path}')
    if data.get("version") != VERSION:
        raise ValueError(
            f"load_recipe: expected version {VERSION} in {path}, got {data.get('version')!r}"
        )
    layers, model = data.get("layers"), data.get("model")
    if not isinstance(layers, dict) or not isinstance(model, str):
        raise ValueError(f"load_recipe: expected a model's name and layers in {path}")
    groups = data.get("smoothing", [])
    if not isinstance(groups, list):
        raise ValueError(f"load_recipe: expected smoothing to be a list in {path}")
    only_faster = data.get("only_faster", True)
    if not isinstance(only_faster, bool):
        raise ValueError(f"load_recipe: expected only_faster true or false in {path}")
    own = {name: _layer(name, each) for name, each in layers.items()}
    return Recipe(model, own, [_smoothing(each, own) for each in groups], only_faster)


_LAYER = {"compute", "input", "output", "why", "note"}


def _layer(name: str, data: Any) -> LayerRecipe:
    if not isinstance(data, dict) or {*data} - _LAYER:
        raise ValueError(
            f"load_recipe: expected compute, input, output, why and note for {name}, got {data!r}"
        )
    input, output = (_numbers(name, key, data.get(key)) for key in ("input", "output"))
    why, note = (str(data.get(key, "")) for key in ("why", "note"))
    own = LayerRecipe("float", input, output, why, note)
    compute = data.get("compute")
    if not isinstance(compute, str) or compute not in COMPUTE:
        raise ValueError(
            f"load_recipe: expected compute {_listed(COMPUTE)} for {name}, got {compute!r}"
        )
    return _computed(name, own, compute)


def _numbers(name: str, key: str, data: Any) -> Numbers | None:
    if data is None:
        return None
    found = data if isinstance(data, dict) else {}
    scale, zero_point, dtype = (found.get(each) for each in ("scale", "zero_point", "dtype"))
    least, most = {"uint8": (0, 255), "int8": (-128, 127)}.get(str(dtype), (1, 0))
    if not _is_positive(scale) or type(zero_point) is not int or not least <= zero_point <= most:
        raise ValueError(
            f"load_recipe: expected scale, zero_point and dtype uint8 or int8 for the {key} of "
            f"{name}, got {data!r}"
        )
    return Numbers(float(scale), zero_point, str(dtype))  # type: ignore[arg-type]


_GROUP = {"layers", "alpha", "factors", "input", "why"}


def _smoothing_data(own: Smoothing) -> dict[str, Any]:
    """What JSON holds of layers whose input is divided, or of why it is not."""
    if not own.factors:
        return {"layers": [*own.layers], "why": own.why}
    data: dict[str, Any] = {"layers": [*own.layers], "alpha": own.alpha}
    if own.input is not None:
        data["input"] = vars(own.input)
    return {**data, "factors": [*own.factors]}


def _smoothing(data: Any, layers: Mapping[str, LayerRecipe]) -> Smoothing:
    names = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(names, list) or {*data} - _GROUP or not all(n in layers for n in names):
        raise ValueError(
            "load_recipe: expected layers of the recipe, alpha, factors, input and why in "
            f"smoothing, got {str(data)[:100]}"
        )
    listed, factors, alpha = _listed(names), data.get("factors", []), data.get("alpha", 0.0)
    if not isinstance(factors, list) or not all(_is_positive(each) for each in factors):
        raise ValueError(f"load_recipe: expected positive factors in the smoothing of {listed}")
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ValueError(
            f"load_recipe: expected alpha from 0 to 1 in the smoothing of {listed}, got {alpha!r}"
        )
    input = _numbers(listed, "input", data.get("input"))
    if factors and input is None:
        raise ValueError(f"load_recipe: expected input with factors in the smoothing of {listed}")
    return Smoothing(
        tuple(names), float(alpha), tuple(map(float, factors)), input, str(data.get("why", ""))
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
