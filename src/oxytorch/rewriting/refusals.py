"""What `optimize`, `llm.optimize`, `quantize_` and `load_quantized` refuse, in the same words.

caller: the public function, with which the text of an error begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .changes import log_of

Kind = TypeVar("Kind")


def check_module(caller: str, model: object, *, scripted: bool = True) -> None:
    """Raise TypeError for what is no module; scripted: whether one of TorchScript will do."""
    if not isinstance(model, nn.Module) or (
        isinstance(model, torch.jit.ScriptModule) and not scripted
    ):
        raise TypeError(
            f"{caller}: expected model to be a torch.nn.Module, got a {type(model).__name__}"
        )


def check_not_optimized(caller: str, model: nn.Module, then: str = "") -> None:
    """Raise ValueError for an optimized model; then: what to do after `undo`."""
    if log_of(model) is not None:
        raise ValueError(
            f"{caller}: expected a model that is not optimized yet, got an optimized one; "
            f"call oxytorch.undo(model) first{then}"
        )


def check_evaluation(caller: str, model: nn.Module, otherwise: str = "") -> None:
    """Raise ValueError for a model in training mode; otherwise: another remedy than `eval`."""
    if model.training:
        raise ValueError(
            f"{caller}: expected model in evaluation mode, got one in training mode; "
            f"call model.eval() first{otherwise}"
        )


def check_has_sizes(caller: str, model: nn.Module) -> None:
    """Raise ValueError for a model with lazy layers that have seen no input."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{caller}: expected a model whose layers know their sizes, got a lazy layer that "
                f"has seen no input yet ({name}); call the model once first"
            )


def check_dtype_keys(model: nn.Module, dtype: Mapping[Any, torch.dtype]) -> None:
    """Raise for keys of `optimize`'s `dtype` that are no types and no paths of modules."""
    paths = {path for path, _ in model.named_modules()}
    for key in dtype:
        if not isinstance(key, str | type):
            raise TypeError(
                f"optimize: expected dtype keys to be paths or types of modules, got {key!r}"
            )
        if isinstance(key, str) and key and key not in paths:
            raise ValueError(
                "optimize: expected dtype keys to be types, or paths as in "
                f"model.named_modules(), got {key!r}, which is none"
            )


def attached(caller: str, model: nn.Module, attribute: str, kind: type[Kind], maker: str) -> Kind:
    """What `maker` left in the attribute of a model; raises ValueError for any other model."""
    found = model.__dict__.get(attribute)
    if not isinstance(found, kind):
        raise ValueError(
            f"{caller}: expected a model that {maker} returned, got another "
            f"{type(model).__name__}; call {maker} first"
        )
    return found


def check_data(caller: str, name: str, data: Any) -> None:
    """Raise TypeError for one input in place of several; name: the argument."""
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise TypeError(
            f"{caller}: expected {name} to be a list of inputs, got a {type(data).__name__}; put "
            "it into a list"
        )


def names_in(caller: str, name: str, given: Any) -> list[str]:
    """The names in an argument that is called `name`; raises TypeError for what holds none."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = [*given]
        if all(isinstance(value, str) for value in found):
            return found
        given = found
    raise TypeError(f"{caller}: expected {name} to be a list of names, got {given!r}")


def check_finite(
    caller: str, name: str, values: Tensor, error: type[ValueError] = ValueError
) -> None:
    """Raise `error` for a floating tensor that holds NaN or infinity; name: what it is called."""
    if values.numel() == 0:
        return
    least, most = torch.aminmax(values.detach())
    if not (bool(least.isfinite()) and bool(most.isfinite())):
        raise error(f"{caller}: expected finite values in {name}, got NaN or infinity")
