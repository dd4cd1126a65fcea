"""Recipes: how each layer of a model is computed, as a person reads and edits it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...program.passes.quantized import Layer, Numbers

FORMAT, VERSION = "oxytorch.recipe", 1
COMPUTE = {
    "static": "activations are rounded to 8 bits by ranges that calibration found",
    "dynamic": "each row of an activation is rounded by its own largest magnitude",
    "float": "the layer is computed in the dtype of the rest of the model",
}
"""How a layer is computed."""


@dataclass(frozen=True)
class LayerRecipe:
    """How one layer is computed; compute: a key of COMPUTE.

    input, output: the bytes of what it takes, and of what it gives where that is added to something
    else, if calibration saw them. why: the reason why it is "float", if it has to be.
    """

    compute: str
    input: Numbers | None = None
    output: Numbers | None = None
    why: str = ""


@dataclass
class Recipe:
    """How the layers of a model are computed.

    model: the class of the model. layers: by the path of the module that holds the weight.
    """

    model: str
    layers: dict[str, LayerRecipe] = field(default_factory=dict)

    def chosen(self) -> dict[str, Layer]:
        """The layers that multiply bytes."""
        return {
            name: Layer(own.input if own.compute == "static" else None, own.output)
            for name, own in self.layers.items()
            if own.compute != "float"
        }

    def set(self, names: str, compute: str) -> Recipe:
        """A recipe in which layers are computed in another way.

        names: of a layer or of a module with layers below it; * matches anything. compute:
        "static", "dynamic" or "float". Raises ValueError where no layer has such a name, or one
        cannot be computed so.
        """
        if compute not in COMPUTE:
            raise ValueError(f"recipe: expected compute {_listed(COMPUTE)}, got {compute!r}")
        found = [*self._named(names)]
        if not found:
            raise ValueError(
                f"recipe: expected the name of a layer, got {names!r}, which matches none; layers "
                f"are {_listed([*self.layers][:5])} ..."
            )
        changed = {name: _computed(name, self.layers[name], compute) for name in found}
        return Recipe(self.model, {**self.layers, **changed})

    def _named(self, names: str) -> Iterator[str]:
        for name in self.layers:
            own = name.partition("#")[0]
            if any(fnmatchcase(each, p) for each in (name, own) for p in (names, f"{names}.*")):
                yield name

    def __str__(self) -> str:
        width = max(map(len, self.layers), default=0)
        lines = [f"recipe for {self.model}, {len(self.layers)} layers"]
        for name, own in self.layers.items():
            shown = own.why
            if own.compute == "static" and own.input is not None:
                shown = _shown(own.input)
            lines.append(f"  {name:<{width}}  {own.compute:<7}  {shown}".rstrip())
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
    return replace(own, compute=compute)


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe to a JSON file, which a person can read and edit; see `load_recipe`."""
    layers = {name: _data(own) for name, own in recipe.layers.items()}
    data = {"format": FORMAT, "version": VERSION, "model": recipe.model, "layers": layers}
    Path(path).write_text(json.dumps(data, indent=2) + "\n")


def _data(own: LayerRecipe) -> dict[str, Any]:
    data: dict[str, Any] = {"compute": own.compute}
    for key in ("input", "output"):
        numbers: Numbers | None = getattr(own, key)
        if numbers is not None:
            data[key] = vars(numbers)
    return {**data, "why": own.why} if own.why else data


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe that `save_recipe` wrote. Raises ValueError, which names the entry, where the
    file is none."""
    try:
        data = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"load_recipe: expected a JSON file, got {path} ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'load_recipe: expected "format": "{FORMAT}" in {path}')
    if data.get("version") != VERSION:
        raise ValueError(
            f"load_recipe: expected version {VERSION} in {path}, got {data.get('version')!r}"
        )
    layers, model = data.get("layers"), data.get("model")
    if not isinstance(layers, dict) or not isinstance(model, str):
        raise ValueError(f"load_recipe: expected a model's name and layers in {path}")
    return Recipe(model, {name: _layer(name, own) for name, own in layers.items()})


def _layer(name: str, data: Any) -> LayerRecipe:
    if not isinstance(data, dict) or {*data} - {"compute", "input", "output", "why"}:
        raise ValueError(
            f"load_recipe: expected compute, input, output and why for {name}, got {data!r}"
        )
    input, output = (_numbers(name, key, data.get(key)) for key in ("input", "output"))
    own = LayerRecipe("float", input, output, str(data.get("why", "")))
    compute = data.get("compute")
    if compute not in COMPUTE:
        raise ValueError(
            f"load_recipe: expected compute {_listed(COMPUTE)} for {name}, got {compute!r}"
        )
    return _computed(name, own, compute)


def _numbers(name: str, key: str, data: Any) -> Numbers | None:
    if data is None:
        return None
    found = data if isinstance(data, dict) else {}
    scale, zero_point, dtype = (found.get(each) for each in ("scale", "zero_point", "dtype"))
    is_scale = isinstance(scale, int | float) and math.isfinite(scale) and scale > 0
    least, most = {"uint8": (0, 255), "int8": (-128, 127)}.get(str(dtype), (1, 0))
    if not is_scale or type(zero_point) is not int or not least <= zero_point <= most:
        raise ValueError(
            f"load_recipe: expected scale, zero_point and dtype uint8 or int8 for the {key} of "
            f"{name}, got {data!r}"
        )
    return Numbers(float(scale), zero_point, str(dtype))  # type: ignore[arg-type]
