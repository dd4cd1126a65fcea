"""Records of language models as data, for files.

A record is a dictionary of its fields, with the name of its class as `is`; a packed weight one of
what it is and of the entries of its tensors; a module whose parameters a record reads one of these;
a tensor its entry. When it is read, each value has to be what its field's annotation says.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.described_file import Tensors
from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight
from ..quantization.described import PARTS, described, from_description
from .layer import Attention, DecoderLayer, Mlp, Norm, Product, RoutedMlp
from .record import Angles, FusedModel, RotaryTable

_RECORDS = {
    kind.__name__: kind
    for kind in (
        Angles,
        Attention,
        DecoderLayer,
        FusedModel,
        Mlp,
        Norm,
        Product,
        RotaryTable,
        RoutedMlp,
    )
}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


class Parameters(nn.Module):
    """The parameters of a module that records read. An embedding's are looked up by calling it."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in (("weight", weight), ("bias", bias)):
            own = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(name, own)

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of these numbers."""
        return F.embedding(tokens, self.get_parameter("weight"))


def data_of(value: Any, name: str, tensors: Tensors) -> Any:
    """A record, or a value of one, as data; its tensors are added to `tensors`.

    name: what its tensors are called there. Raises ValueError for a weight that is looked up in
    another.
    """
    if isinstance(value, PanelWeight):
        parts = {
            part: tensors.entry(tensor, f"{name}.{part}")
            for part, tensor in value.tensors().items()
        }
        return {**described(value), "tensors": parts}
    if isinstance(value, PackedTensor):
        raise ValueError(f"a file holds no {type(value).__name__}, got {name} as one")
    if isinstance(value, Tensor):
        return tensors.entry(value, name)
    if isinstance(value, nn.Module):
        found = {key: value._parameters.get(key) for key in ("weight", "bias")}
        return {key: data_of(each, f"{name}.{key}", tensors) for key, each in found.items()}
    if dataclasses.is_dataclass(value):
        kept = {
            each.name: data_of(getattr(value, each.name), f"{name}.{each.name}", tensors)
            for each in _fields(type(value))
        }
        return {"is": type(value).__name__, **kept}
    if isinstance(value, (list, tuple)):
        return [data_of(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _fields(kind: Any) -> Iterator[Any]:
    """The fields that are kept of a record."""
    for each in dataclasses.fields(kind):
        if each.init and not each.name.startswith("_") and each.metadata.get("kept", True):
            yield each


_hints = cache(get_type_hints)


class Reader:
    """Makes records of data.

    tensor: gives the tensor of an entry, or raises ValueError.
    """

    def __init__(self, tensor: Callable[[Any], Tensor]) -> None:
        self._tensor = tensor

    def model(self, data: Any) -> FusedModel:
        """The record of a whole model; raises ValueError where the data is none."""
        found: FusedModel = self._value(FusedModel, data, "model")
        return found

    def _value(self, kind: Any, data: Any, name: str) -> Any:
        kind = _chosen(kind, data, name)
        parts = get_args(kind)
        if kind is NoneType:
            return None
        if get_origin(kind) is list and isinstance(data, list):
            return [self._value(parts[0], each, f"{name}.{i}") for i, each in enumerate(data)]
        if get_origin(kind) is tuple and isinstance(data, list) and len(data) == len(parts):
            both = zip(parts, data, strict=True)
            return tuple(
                self._value(own, each, f"{name}.{i}") for i, (own, each) in enumerate(both)
            )
        if kind is Tensor and isinstance(data, dict):
            return self._weight(data, name) if "tensors" in data else self._plain(data, name)
        if kind is nn.Module and isinstance(data, dict):
            optional = Tensor | None
            found = [self._value(optional, data.get(k), f"{name}.{k}") for k in ("weight", "bias")]
            return Parameters(*found)
        if _RECORDS.get(getattr(kind, "__name__", "")) is kind and isinstance(data, dict):
            return self._record(kind, data, name)
        return _plain_value(kind, data, name)

    def _record(self, kind: Any, data: dict[str, Any], name: str) -> Any:
        names = [each.name for each in _fields(kind)]
        if data.get("is") != kind.__name__ or {*data} != {"is", *names}:
            raise ValueError(
                f"expected {name} to be a {kind.__name__} of {', '.join(names)}, got "
                f"{str(data)[:100]}"
            )
        hints = _hints(kind)
        return kind(**{key: self._value(hints[key], data[key], f"{name}.{key}") for key in names})

    def _plain(self, entry: dict[str, Any], name: str) -> Tensor:
        try:
            return self._tensor(entry)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _weight(self, data: dict[str, Any], name: str) -> PanelWeight:
        entries = data["tensors"]
        if not isinstance(entries, dict) or not {*entries} <= {*PARTS}:
            raise ValueError(f"expected {name} to be a packed weight, got {str(data)[:100]}")
        tensors = {part: self._plain(entry, name) for part, entry in entries.items()}
        try:
            return from_description(data, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"expected {name} to fit its tensors, got {error}") from error


def _chosen(kind: Any, data: Any, name: str) -> Any:
    """The one among the kinds that an annotation allows which some data is to be."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = get_args(kind)
    if data is None and NoneType in kinds:
        return NoneType
    left = [each for each in kinds if each is not NoneType]
    if len(left) > 1:
        wanted = data.get("is") if isinstance(data, dict) else None
        left = [each for each in left if each.__name__ == wanted and wanted in _RECORDS]
    if len(left) != 1:
        raise ValueError(f"expected {name} to be a {kind}, got {str(data)[:100]}")
    return left[0]


def _plain_value(kind: Any, data: Any, name: str) -> Any:
    if kind is torch.dtype and isinstance(data, str) and data in _DTYPES:
        return _DTYPES[data]
    if kind is float and type(data) in (int, float) and abs(data) <= sys.float_info.max:
        return float(data)
    if kind in (bool, int, str) and type(data) is kind:
        return data
    shown = getattr(kind, "__name__", str(kind))
    raise ValueError(f"expected {name} to be a {shown}, got {str(data)[:100]}")
