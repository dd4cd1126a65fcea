"""Pass `join`: linear layers called with one and the same tensor are computed as one product.

Which layers share an input is seen in the run on the sample input, so the pass needs one. The
first layer called computes the joined product and keeps the others' parts for their calls; a layer
called with another tensor computes its own part alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ...core.looked_up import LookUpWeight
from ...core.modes import is_plain_inference, runs_recorded
from ...core.packed import PackedTensor, packed_around
from ...graph.forward import Forward
from ...ops.linear import PackedLinearWeight, linear
from ..context import OptimizeContext
from .pack import refusal


class JoinedPart(LookUpWeight):
    """One layer's weight: the outputs `begin` to `end` of several as one [outputs, in]."""

    packed: PackedLinearWeight
    begin: int
    end: int
    _shared_fields = ("packed", "begin", "end")

    def __new__(cls, packed: PackedLinearWeight, begin: int, end: int) -> JoinedPart:
        result = PackedTensor._wrap(cls, (end - begin, packed.shape[1]), packed.dtype)
        result.packed, result.begin, result.end = packed, begin, end
        return result

    def repack(self, values: torch.Tensor) -> None:
        whole = self.packed.values()
        whole[self.begin : self.end] = values.detach().to(self.dtype)
        self.packed.repack(whole)

    def restore(self) -> torch.Tensor:
        return self.packed.values()[self.begin : self.end].clone()

    def copy(self) -> PackedLinearWeight:  # type: ignore[override]
        return PackedLinearWeight(self.values())

    def _around(self, values: torch.Tensor) -> Any:
        # Other values than those of the product belong to one layer alone.
        return packed_around(PackedLinearWeight, values, {"transposed": False})

    def nbytes_packed(self) -> int:
        return self.numel() * self.element_size()


def joined(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[JoinedPart]:
    """Weights [out_i, in] as parts of one."""
    whole = PackedLinearWeight(torch.cat([weight.to(dtype) for weight in weights]))
    ends = [*accumulate(weight.shape[0] for weight in weights)]
    return [JoinedPart(whole, begin, end) for begin, end in pairwise([0, *ends])]


class JoinedForward(Forward):
    """The forward of one of several layers that are computed together."""

    def __init__(self, module: nn.Module, index: int, group: Group, converts: bool) -> None:
        super().__init__(module, converts)
        self.index = index
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            found = self.group.part(args[0], self.index, self.converts)
            if found is not None:
                return found
        return self.own(*args, **kwargs)


class Group:
    """The layers computed together, and what the last product left for those not yet called."""

    def __init__(self, parts: Sequence[JoinedPart], modules: Sequence[nn.Module]) -> None:
        self.whole = parts[0].packed
        self.begins = [part.begin for part in parts]
        self.sizes = [part.shape[0] for part in parts]
        self.modules = modules
        self._waiting = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_waiting"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._waiting = threading.local()

    def part(self, x: torch.Tensor, index: int, converts: bool) -> torch.Tensor | None:
        """One layer's result, from the product that the first of them computed; None where the
        layer's own code has to run."""
        if not is_plain_inference() or x.is_inference():  # writes to x are not counted there
            return None
        weights: list[Any] = [m._parameters.get("weight") for m in self.modules]
        whole = self.whole
        for begin, weight in zip(self.begins, weights, strict=True):
            if type(weight) is not JoinedPart or weight.packed is not whole:
                return None
            if weight.begin != begin or not weight.is_packed():
                return None
        if not whole.is_packed():
            return None
        same_dtype = x.dtype == whole.dtype or (converts and x.is_floating_point())
        if not same_dtype or x.dim() == 0 or x.shape[-1] != whole.shape[1]:
            return None
        waiting = self._waiting.__dict__
        ticks = [weight.cell.clock._version for weight in weights]
        biases: list[Any] = [m._parameters.get("bias", False) for m in self.modules]
        if any(bias is False for bias in biases):
            return None
        key = [
            runs_recorded(),
            x._version,
            *ticks,
            *(-1 if b is None else b._version for b in biases),
        ]
        if waiting.get("x") is x and waiting["key"] == key and index in waiting["parts"]:
            part: torch.Tensor = waiting["parts"].pop(index)
            if not waiting["parts"]:
                waiting.clear()
            return part
        bias = None if biases[0] is None else torch.cat(biases)
        result = linear(x.to(whole.dtype), whole, bias)
        parts = dict(enumerate(torch.split(result, self.sizes, -1)))
        part = parts.pop(index)
        waiting.update(x=x, key=key, parts=parts)
        return part


def run(context: OptimizeContext) -> None:
    if context.sample is None:
        context.skipped(
            "join", context.model, "needs sample_input to see which layers share an input"
        )
        return
    for modules in context.observed.shared_inputs:
        reason = _refusal(context, modules)
        if reason is not None:
            context.skipped("join", modules[0], reason)
            continue
        weights = [m._parameters["weight"] for m in modules]
        dtype = context.target_dtype(modules[0], weights[0])  # type: ignore[arg-type]
        parts = joined([w.detach() for w in weights if w is not None], dtype)
        group = Group(parts, modules)
        for index, (module, own) in enumerate(zip(modules, parts, strict=True)):
            weight, bias = module._parameters["weight"], module._parameters["bias"]
            assert weight is not None
            converts = context.is_converted(module)
            part = own.as_parameter(weight.requires_grad)
            context.set_parameter(module, "weight", part)
            if bias is not None and bias.dtype != dtype:
                converted = nn.Parameter(bias.detach().to(dtype), bias.requires_grad)
                context.set_parameter(module, "bias", converted)
            context.log.set_forward(module, JoinedForward(module, index, group, converts))
            context.log.prepare_for_packed(module)
            context.applied("join", module, f"one of {len(modules)} layers computed together")


def _refusal(context: OptimizeContext, modules: tuple[nn.Module, ...]) -> str | None:
    for module in modules:
        if type(module) is not nn.Linear or module in context.closed:
            return "shares its input, but is no plain linear layer"
        if module in context.fused_layers:
            return "shares its input, but is fused with what follows it"
        reason = refusal(context, module)
        if reason is not None:
            return reason
        if len(context.owners[id(module._parameters["weight"])]) > 1:
            return "shares its input, but also its weight"
    if len({module._parameters["bias"] is None for module in modules}) > 1:
        return "shares its input, but only some of the layers have a bias"
    first = modules[0]._parameters["weight"]
    dtypes = {context.target_dtype(m, first) for m in modules}  # type: ignore[arg-type]
    return None if len(dtypes) == 1 else "shares its input, but not its dtype"
