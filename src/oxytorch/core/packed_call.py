"""A layer's product with a packed weight in one function of the library, with all checks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._library import functions_in_known_torch
from .watched import is_parameter
from .words import keys_of, set_offsets

PackedCall = Callable[[Any, nn.Module, dict[str, Any]], Any]
"""Of an input, the module and its parameters: the result; None where it is for others to compute;
False where this will never compute one again."""

_OBJECTS = (
    "tensor_class", "weight_name", "weight", "bias_name", "bias", "forward_name", "forward",
    "functions", "function_name", "function", "clock", "packed", "module_class",
    "weight_class", "bias_class",
)  # fmt: skip
_NUMBERS = (
    "plain_keys", "inference_keys", "version", "in_features", "out_features", "least_rows",
    "most_rows",
)  # fmt: skip


class _Given(ctypes.Structure):
    """`PackedCall::Given` of core/packed_call.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _OBJECTS),
        *((name, ctypes.c_uint64 if "keys" in name else ctypes.c_int64) for name in _NUMBERS),
        ("format", ctypes.c_char_p),
    )


class PackedProduct(NamedTuple):
    """What a call computes: x @ weight.T + bias.

    packed: the weight in panels of a format, or, where that is None, in oneDNN's order.
    least_rows, most_rows: of inputs; others are for others to compute.
    clock, version: the tensor that counts what is done to the weight, and its count at the time
        when the weight was asked for the rest of this.
    """

    packed: Tensor
    format: str | None
    in_features: int
    out_features: int
    least_rows: int
    most_rows: int
    clock: Tensor
    version: int


class Watched(NamedTuple):
    """What a layer's own code depends on besides its parameters: the forward of its class, and a
    function that this calls by its name in a dictionary."""

    forward: Any
    functions: dict[str, Any] | None
    name: str | None
    function: Any


def packed_call(module: nn.Module, product: PackedProduct, watched: Watched) -> PackedCall | None:
    """The function that computes a module's product, or None where there is none."""
    library = functions_in_known_torch()
    if library is None:
        return None
    set_offsets(library)
    bias = module._parameters.get("bias")
    is_plain = bias is None or is_parameter(bias)
    if not is_plain or not library.oxytorch_can_call_packed(product.format is not None):
        return None
    objects: dict[str, Any] = {
        "tensor_class": Tensor,
        "weight_name": "weight",
        "weight": module._parameters["weight"],
        "bias_name": "bias",
        "forward_name": "forward",
        "clock": product.clock,
        "packed": product.packed,
        "module_class": type(module),
        "weight_class": type(module._parameters["weight"]),
        **watched._asdict(),
    }
    objects["function_name"] = objects.pop("name")
    if objects["function"] is None:
        del objects["functions"], objects["function_name"], objects["function"]
    if "bias" in module._parameters:
        objects["bias"] = bias
    if bias is not None:
        objects["bias_class"] = type(bias)
    given = _Given(
        **{name: id(value) for name, value in objects.items()},
        **dict(zip(("plain_keys", "inference_keys"), _plain_keys(), strict=True)),
        version=product.version,
        in_features=product.in_features,
        out_features=product.out_features,
        least_rows=product.least_rows,
        most_rows=product.most_rows,
        format=None if product.format is None else product.format.encode(),
    )
    function: PackedCall
    function = library.oxytorch_packed_call(ctypes.byref(given), tuple(objects.values()))
    return function


@functools.cache
def _plain_keys() -> tuple[int, int]:
    """The keys of plain tensors on the CPU, and of those made in inference mode."""
    with torch.inference_mode(False):
        plain = torch.zeros(1, device="cpu")
    with torch.inference_mode():
        return keys_of(plain), keys_of(torch.zeros(1, device="cpu"))
