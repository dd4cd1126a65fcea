"""What is done for a decoder layer that is not fused: its MLP, its norms, its linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..core.interruption import pass_on_interruption
from ..core.packed import PackedTensor
from ..graph.agreement import FUSED_LAYER, difference
from ..graph.recognize import linear_of_module
from . import recipes
from .checking import wide_copy
from .forwards import RecordForward
from .layer import Mlp
from .matching import Unmatched, activation_of, find, mlp_products, norm_of
from .packing import Packer
from .plan import NormPlan, Products

ROUTERS = ("gate", "router")
"""Layers whose few weights choose experts: they stay as they are."""


def improve_parts(layer: nn.Module, packer: Packer) -> Iterator[tuple[str, str]]:
    """Improves the parts of a layer; yields the path of each, relative to it, and what was done.

    Like whole layers, norms and gated MLPs are tried as float32 copies first.
    """
    wide = wide_copy(layer)
    packed: set[str] = set()
    gated = _gated_mlp(layer, wide, packer)
    if gated is not None:
        path, packed = gated
        yield path, "gated MLP as two products"
    for path, module in layer.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or path in packed or path.rpartition(".")[2] in ROUTERS:
            continue
        norm = norm_of(wide, path)
        if norm is not None:
            if set_norm_forward(layer, norm, packer):
                yield path, f"{type(module).__name__} in our kernel"
            continue
        form = None if isinstance(weight, PackedTensor) else stored_transposed(module)
        if form is not None:
            packed.add(path)
            packer.single(module, form, path)
            if isinstance(module._parameters["weight"], PackedTensor):
                yield path, f"{type(module).__name__} packed"
    packer.cast_rest(layer, packed, set())


def set_norm_forward(layer: nn.Module, norm: NormPlan, packer: Packer) -> bool:
    """Lets a norm run in our kernel wherever it is called; False where it has a forward already."""
    module = layer.get_submodule(norm.path)
    if "forward" in module.__dict__:
        return False
    packer.log.set_forward(module, RecordForward(module, norm.build(layer)))
    return True


def stored_transposed(module: nn.Module) -> bool | None:
    """Whether a linear layer's weight is stored transposed; None where it is no linear layer."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    if type(module) is nn.Linear:
        return False
    form = linear_of_module(wide_copy(module))
    return None if form is None else form.transposed


def _gated_mlp(layer: nn.Module, wide: nn.Module, packer: Packer) -> tuple[str, set[str]] | None:
    """Makes products of a gated MLP; returns its path and those of its linear layers."""
    path = find(layer, tuple(name for name in recipes.MLP if name))
    if path is None:
        return None
    try:
        found = mlp_products(wide, path)
        if found is None or not found[0].gated:
            return None
        up, down = found
        activation_fn = activation_of(wide.get_submodule(path), True)
        for product in found:
            packer.order(layer, product)
    except Unmatched:  # the linear layers are packed one by one then
        return None
    trial = Mlp(Products().of(wide, up), Products().of(wide, down), activation_fn)
    x = torch.randn(
        5, trial.up.weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu"
    )
    module, copy = layer.get_submodule(path), wide.get_submodule(path)
    if "forward" in module.__dict__:
        return None
    try:
        with torch.no_grad():
            expected = copy(x)
    except Exception as error:  # by which a user's module only says that it is something else
        pass_on_interruption(error)
        return None
    with torch.no_grad():
        gap = difference(expected, trial(x, None))
    if not isinstance(expected, torch.Tensor) or gap > FUSED_LAYER:
        return None
    fused = Mlp(packer.of(layer, up), packer.of(layer, down), activation_fn)
    packer.log.set_forward(module, RecordForward(module, fused))
    return path, {*up.paths, *down.paths}
