"""What stands in a module's own dictionary while its model is trained with split weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.converted import Conversion, converted
from ..graph.boundary import UNFIT, explain_dtypes
from ..graph.forward import AroundForward, OwnSignature
from ..graph.mixed_norms import norms_in_one_dtype
from ..optim import split_contexts, split_views
from ..optim.compiler import never_compiled, never_compiled_alone
from ..optim.split_parameter import SplitParameter

TAKE_ANY = (
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
"""Layers that take inputs of another dtype than their parameters'."""


def is_layer(module: nn.Module) -> bool:
    """Whether torch wrote the module, and not the model's author."""
    return type(module).__module__.startswith("torch.nn")


class UpperHalvesForward(AroundForward):
    """A module's own forward, inside of which split parameters are their upper halves: its class's,
    or one that was set before."""

    stands_in = False

    def is_layers(self) -> bool:
        """Whether it is the code of a layer of torch, and none that calls others and their hooks
        alone."""
        return self.inner is None and is_layer(self.module) and bool(self.module._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _computing(self.is_layers()), norms_in_one_dtype():
            return self.forward(*args, **kwargs)


class ModelForward(OwnSignature):
    """The forward of the model itself, its class's or one that was set before: on the CPU under
    autocast, since its code may bring float32 tensors together with bfloat16 ones."""

    stands_in = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", UpperHalvesForward(module))
        if isinstance(self.inner, Bfloat16Forward):
            self.inner.is_model = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with _autocast(self.module):
                return self.inner(*args, **kwargs)
        try:
            with _autocast(self.module):
                return split_views.without_views(self.inner(*args, **kwargs))
        except UNFIT as error:
            explain_dtypes(error, partial(_advice, self.module))
            raise


class PartForward(ModelForward):
    """The forward of a part of the model that calls others.

    Code outside of any forward that calls it (a method of the model, the training loop) gets
    float32, as split weights are to that code, unless that has an autocast of its own.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_outermost(self.module):
            return converted(super().__call__(*args, **kwargs), torch.float32)
        return type(self.module).forward(self.module, *args, **kwargs)


def _advice(model: nn.Module) -> str:
    device = _device(model)
    remedies = [
        "pass its inputs in bfloat16",
        "convert one of the two in the model's code (x.to(y.dtype))",
        "call .float() on what an operator without bfloat16 is given",
        "name a part that is to compute in float32: optimize(..., dtype={'': torch.bfloat16, "
        "'path.of.the.part': torch.float32})",
    ]
    if device != "cpu":
        remedies.insert(0, f"call the model under torch.autocast({device!r}, torch.bfloat16)")
    return (
        f"the code of {type(model).__name__}, which is trained in bfloat16, mixes dtypes where "
        "torch does not convert them, or calls what has no bfloat16 (the error above says where); "
        f"{'; or '.join(remedies)}"
    )


class Bfloat16Forward(UpperHalvesForward):
    """The same of a module that is to compute in bfloat16.

    Layers of torch are given bfloat16 and return it. While their parameters are plain float32, for
    no optimizer of ours holds them all, or one of them was replaced since or is made of others,
    they run under autocast, as other modules always do on the CPU.

    Code outside of any forward gets float32, as of a `PartForward`.

    is_model: whether it is the model itself, which returns bfloat16 to any code.
    """

    is_model = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        own = module._parameters.items()
        self.names = [name for name, p in own if p is not None and p.is_floating_point()]

    def _is_split(self) -> bool:
        own = self.module._parameters
        is_split = bool(self.names) and all(type(own.get(n)) is SplitParameter for n in self.names)
        return is_split and "parametrizations" not in self.module._modules

    def _casting(self, layer: bool, is_split: bool, is_whole: bool) -> AbstractContextManager[None]:
        """What autocast is to do within the forward."""
        if is_whole:
            return torch.autocast(_device(self.module), enabled=False)
        if is_split:
            return nullcontext() if layer else _autocast(self.module)
        return torch.autocast(_device(self.module), torch.bfloat16)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        layer = is_layer(module)
        is_outermost = not self.is_model and _is_outermost(module)
        is_split = self._is_split()
        # Recurrent layers refuse inputs of another dtype than their weights', autocast or not.
        is_whole = not is_split and isinstance(module, nn.RNNBase)
        if layer and type(module) not in TAKE_ANY:
            dtype = torch.float32 if is_whole else torch.bfloat16
            args, kwargs = Conversion(dtype).arguments(args, kwargs)
        weights = split_contexts.whole() if is_whole else _computing(self.is_layers())
        with weights, self._casting(layer, is_split, is_whole):
            result = self.forward(*args, **kwargs)
        if is_outermost:
            return converted(result, torch.float32)
        return converted(result, torch.bfloat16) if layer and not is_split else result


class ParametrizationForward(UpperHalvesForward):
    """What makes a layer's weight of others (torch.nn.utils.parametrize): in float32.

    Forwards are given the result in bfloat16, as any weight.
    """

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_computing = split_contexts.is_upper_half()
        with split_contexts.whole(), torch.autocast(_device(self.module), enabled=False):
            result = self.forward(*args, **kwargs)
        return converted(result, torch.bfloat16) if is_computing else result


class OwnDtypeForward(UpperHalvesForward):
    """The forward of a module that keeps its dtype among others, which it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = (p for p in self.module.parameters() if p.is_floating_point())
        dtype = next((p.dtype for p in own), None)
        conversion = None if dtype is None else Conversion(dtype)
        if conversion is not None:
            args, kwargs = conversion.arguments(args, kwargs)
        with torch.autocast(_device(self.module), enabled=False):
            result = super().__call__(*args, **kwargs)
        if conversion is not None:
            conversion.write_back()
        return result


def _device(module: nn.Module) -> str:
    """The kind of device that the module's parameters are on."""
    first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type


def _autocast(module: nn.Module) -> AbstractContextManager[None]:
    """Autocast to bfloat16 on the CPU, where its list holds products alone and costs no time; the
    user's own comes first. On GPUs it would make normalizations and softmax float32."""
    if _device(module) != "cpu" or torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


@never_compiled_alone
def _is_outermost(module: nn.Module) -> bool:
    """Whether what calls the module is neither a forward of another nor code under autocast, and
    sees whole weights: what torch's compiler looks at sees upper halves."""
    if torch.compiler.is_compiling() or split_contexts.is_computing():
        return False
    device = _device(module)
    if torch.is_autocast_enabled(device):
        return False
    # Activation checkpoints run parts again in backward, and bring back the CPU's autocast alone.
    return device == "cpu" or torch._C._current_graph_task_id() == -1


@never_compiled_alone
def _computing(in_layer: bool) -> AbstractContextManager[None]:
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export: expected no model that is trained with split weights, which are no "
            "plain tensors; export oxytorch.undo(copy.deepcopy(model)), a float32 copy, which "
            "oxytorch.save and oxytorch.graph.explain take too"
        )
    return nullcontext() if torch.compiler.is_compiling() else split_contexts.computing(in_layer)


class ApplyRefusal:
    """`Module._apply`, which refuses other dtypes for split weights before it converts anything."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if any(type(own) is SplitParameter for own in self.module.parameters(recurse)):
            dtype = function(torch.empty(0, dtype=torch.float32, device="cpu")).dtype
            if dtype != torch.float32:
                raise TypeError(
                    f"{type(self.module).__name__}: expected no conversion to "
                    f"{str(dtype).removeprefix('torch.')} of a model that is trained with split "
                    "weights: its optimizer updates float32; oxytorch.undo(model) makes its "
                    "weights plain float32, a copy.deepcopy has them so, and both convert"
                )
        kind: Any = type(self.module)
        result: nn.Module = kind._apply(self.module, function, recurse)
        return result


class Saving:
    """`save_pretrained` of a model, to which split weights say that they are float32."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self.model)
        with split_contexts.saving():
            return kind.save_pretrained(self.model, *args, **kwargs)
