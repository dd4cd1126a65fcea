"""The predecessor's `quantization.prepare`, `convert` and `autotune`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from .. import quantization
from ..quantization.configs import WeightConfig
from ..quantization.static.recipe import Recipe, load_recipe, save_recipe
from ..rewriting.refusals import attached
from .errors import not_served
from .qconfigs import settings_of

_ATTRIBUTE = "_oxytorch_compat"
_ATTRIBUTES = (_ATTRIBUTE, "save_qconf_summary", "load_qconf_summary")
"""All that `prepare` puts into a model, beside its forward."""


@dataclass
class Prepared:
    """What `convert` has to do to a model.

    settings: as `oxytorch.quantization` takes them.
    recipe: of layers, if one was loaded or tuned.
    """

    settings: WeightConfig | quantization.Int8StaticActivationInt8Weight
    example_inputs: Any
    recipe: Recipe | None = None


def prepare(
    model: nn.Module,
    configure: Any,
    example_inputs: Any = None,
    inplace: bool = False,
    bn_folding: bool = True,
    example_kwarg_inputs: Any = None,
) -> Any:
    """Return a model to call on typical data, and to convert then.

    configure: a `QConfigMapping`, a `QConfig`, or what `get_weight_only_quant_qconfig_mapping` or
        `get_smooth_quant_qconfig_mapping` returned. Static settings take all layers; of observers
        of weights there is one, a scale for each output.
    example_inputs, example_kwarg_inputs: arguments of a call, positional ones or by name; one of
        both, but for weights alone.
    inplace: for dynamic and weight-only settings; others return a copy, which is to be called.
    bn_folding: accepted; batch normalizations are folded where that is faster.
    """
    settings = settings_of(configure)
    if example_inputs is not None and example_kwarg_inputs is not None:
        raise ValueError("prepare: expected example_inputs or example_kwarg_inputs, got both")
    inputs = example_inputs if example_kwarg_inputs is None else example_kwarg_inputs
    if isinstance(settings, WeightConfig):
        result = model if inplace else copy.deepcopy(model)
        _mark(result, Prepared(settings, inputs))
        return result
    if inputs is None:
        raise ValueError(
            "prepare: expected example_inputs=(...) or example_kwarg_inputs={...} for static "
            "quantization, got neither"
        )
    if inplace:
        raise not_served(
            "prepare(inplace=True) for static quantization",
            "leave it out and call the model that prepare returns: prepared = prepare(...)",
        )
    result = quantization.prepare(model, settings, inputs)
    _mark(result, Prepared(settings, inputs))
    result.__dict__["save_qconf_summary"] = MethodType(save_qconf_summary, result)
    result.__dict__["load_qconf_summary"] = MethodType(load_qconf_summary, result)
    return result


def convert(model: nn.Module, inplace: bool = False) -> Any:
    """Return the quantized model of one that `prepare` or `autotune` returned.

    inplace: change the model itself; for dynamic and weight-only settings.
    """
    prepared = _prepared(model, "convert")
    if isinstance(prepared.settings, WeightConfig):
        result = model if inplace else copy.deepcopy(model)
        del result.__dict__[_ATTRIBUTE]
        quantization.quantize_(result, prepared.settings)
        return result
    result = quantization.convert(model, prepared.recipe)
    for name in _ATTRIBUTES:
        result.__dict__.pop(name, None)
    return result


def autotune(
    model: nn.Module,
    calib_dataloader: Iterable[Any],
    calib_func: Callable[[nn.Module], Any] | None = None,
    eval_func: Callable[[nn.Module], float] | None = None,
    op_type_dict: Any = None,
    sampling_sizes: list[int] | None = None,
    accuracy_criterion: dict[str, float] | None = None,
    tuning_time: int = 0,
) -> Any:
    """Return a prepared model whose layers are tuned so that accuracy holds, for `convert`.

    model: what `prepare` returned with static settings.
    calib_dataloader: batches; of a pair (inputs, labels) the first is taken.
    eval_func: returns a number that is better the higher it is.
    sampling_sizes: the last is how many batches are taken at most; [100] by default.
    accuracy_criterion: {"relative": 0.01}, the default, or {"absolute": ...}: the most loss.
    calib_func, tuning_time: accepted; the search ends after 24 trials.
    """
    prepared = _prepared(model, "autotune")
    if isinstance(prepared.settings, WeightConfig):
        raise ValueError("autotune: expected a model prepared for static quantization")
    if op_type_dict:
        raise not_served(
            "autotune(op_type_dict=...)",
            "use oxytorch.quantization.autotune with Int8StaticActivationInt8Weight(smooth=True)",
        )
    if eval_func is None:
        raise ValueError("autotune: expected eval_func, a function from a model to its accuracy")
    kind, most = next(iter((accuracy_criterion or {"relative": 0.01}).items()))
    if kind not in ("relative", "absolute"):
        raise ValueError(
            f"autotune: expected accuracy_criterion 'relative' or 'absolute', got {kind!r}"
        )
    result = copy.deepcopy(model)
    found = quantization.autotune(
        _unprepared(model),
        [*_inputs(calib_dataloader, (sampling_sizes or [100])[-1])],
        eval_func,
        most,
        absolute=kind == "absolute",
        config=prepared.settings,
    )
    _prepared(result, "autotune").recipe = found.recipe
    return result


def _unprepared(model: nn.Module) -> nn.Module:
    """A copy of a prepared model as it was before `prepare`."""
    plain = copy.deepcopy(model)
    calibration = plain.__dict__.pop("forward")
    if calibration.inner is not None:
        plain.__dict__["forward"] = calibration.inner
    for name in _ATTRIBUTES:
        plain.__dict__.pop(name, None)
    return plain


def _inputs(data: Iterable[Any], most: int) -> Iterator[Any]:
    for index, batch in enumerate(data):
        if index == most:
            return
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        yield batch[0] if is_pair else batch


def save_qconf_summary(model: nn.Module, qconf_summary: str) -> None:
    """Writes the recipe of a prepared model to a file, in oxytorch's format."""
    recipe = _prepared(model, "save_qconf_summary").recipe
    save_recipe(quantization.recipe_of(model) if recipe is None else recipe, qconf_summary)


def load_qconf_summary(model: nn.Module, qconf_summary: str) -> None:
    """Reads a recipe that `save_qconf_summary` wrote, for `convert`.

    Raises NotServedError for a file that the predecessor wrote, with the layers that it keeps in
    floating point, and ValueError for any other file.
    """
    prepared = _prepared(model, "load_qconf_summary")
    try:
        prepared.recipe = load_recipe(qconf_summary)
    except ValueError:
        layers = _layers_of_predecessor(qconf_summary)
        if layers is None:
            raise
        floating = [name for name, is_floating in layers.items() if is_floating]
        ways = [f".set({name!r}, 'float')" for name in floating[:5]]
        more = ", and so on" if len(floating) > 5 else ""
        kept = f" (as this file has it: recipe_of(prepared){''.join(ways)}{more})" if ways else ""
        raise not_served(
            f"the file {qconf_summary}, which it wrote itself,",
            "call the prepared model on typical data once more, edit what "
            f"oxytorch.quantization.recipe_of(prepared) returns{kept}, and keep it by "
            "save_qconf_summary",
        ) from None


def _layers_of_predecessor(path: str) -> dict[str, bool] | None:
    """Names in a JSON file of the predecessor's, and whether they stay in floating point; None for
    any other file. There, each operator has a name "fqn" and lists of its tensors."""
    try:
        data = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    found: dict[str, bool] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict) and {"fqn", "input_tensor_infos"} <= {*value}:
            tensors = [t for t in value["input_tensor_infos"] or () if isinstance(t, dict)]
            kinds = [t.get("force_dtype") for t in tensors]
            found[str(value["fqn"])] = bool(kinds) and kinds[0] == "torch.float32"
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                look(each)

    look(data)
    return found or None


def _mark(model: nn.Module, prepared: Prepared) -> None:
    model.__dict__[_ATTRIBUTE] = prepared


def _prepared(model: nn.Module, caller: str) -> Prepared:
    return attached(caller, model, _ATTRIBUTE, Prepared, "quantization.prepare")
