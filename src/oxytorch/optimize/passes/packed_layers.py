"""The forwards of linear layers and convolutions with packed weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ...core.modes import must_run_plain
from ...core.packed import PackedTensor
from ...core.packed_call import PackedCall, Watched, packed_call
from ...core.reordered import ReorderedTensor
from ...core.sources import Sources
from ...graph.formats import kept
from ...graph.forward import Forward, with_parameters
from ...graph.patterns import is_packable_convolution
from ...ops.convolution import PackedConvolutionWeight, convolution, takes
from ...ops.linear import PackedLinearWeight, linear


class PackedForward(Forward):
    """The forward of a layer with a packed weight: of a class `kind`, for one tensor."""

    kind = ReorderedTensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            found = self._packed(args[0])
            if found is not None:
                return found
        return self.own(*args, **kwargs)

    def _packed(self, x: Any) -> torch.Tensor | None:
        if self._lost:
            self._repack()
        weight: Any = self.module._parameters.get("weight")
        if type(weight) is not self.kind or type(x) is not torch.Tensor:
            return None
        bias = self._bias()
        if bias is False or must_run_plain(x, weight, bias):
            return None
        if not self._takes(x, weight) or not weight.is_packed():
            return None
        if x.dtype is not weight.dtype:
            if not self.converts or not x.is_floating_point():
                return None
            x = x.to(weight.dtype)
        if weight.scale is not None:
            weight.fold(None)
        try:
            return self._computed(x, weight, bias)
        except (RuntimeError, IndexError):  # the module's own code says what is wrong with x
            return None

    def _takes(self, x: torch.Tensor, weight: Any) -> bool:
        return True

    def _computed(self, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how to compute")


class LinearForward(PackedForward):
    """The forward of a linear layer with a packed weight."""

    kind = PackedLinearWeight  # type: ignore[assignment]

    def __init__(self, module: nn.Module, converts: bool = False) -> None:
        super().__init__(module, converts)
        self._quick: PackedCall | Literal[False] | None = None  # False: there is none
        self._watched = self._find_watched()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or is_dynamo_compiling():
            return super().__call__(*args, **kwargs)
        quick = self._quick
        if quick and forward_ad._current_level < 0:
            module = self.module
            found = quick(args[0], module, module._parameters)
            if found is not None:
                if found is not False:
                    return found
                self._quick = None
        return super().__call__(*args)

    def _computed(self, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        if self._quick is None:
            self._quick = self._find_quick(weight) or False
        return linear(x, weight, bias)

    def _find_quick(self, weight: PackedLinearWeight) -> PackedCall | None:
        product, watched = weight.product(), self._watched
        if product is None or watched is None:
            return None
        return packed_call(self.module, product, watched)

    def _find_watched(self) -> Watched | None:
        """What the layer's own code depends on; None where it is more than a call compares."""
        if len(self._functions) > 1:
            return None
        (name, function), *_ = self._functions or ((None, None),)
        return Watched(self._class_forward, vars(functional), name, function)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_quick": None, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watched = self._find_watched()


class ConvolutionForward(PackedForward):
    """The forward of a convolution with a packed weight."""

    kind = PackedConvolutionWeight  # type: ignore[assignment]

    def __init__(self, module: nn.Module, converts: bool = False) -> None:
        super().__init__(module, converts)
        self.sources = Sources([], owner=module, values=False)

    def _home(self) -> nn.Module:
        # The tracer records what a convolution consists of, which for weights of a class of their
        # own is below its reach.
        weight = self.module._parameters.get("weight")
        if torch._C._get_tracing_state() is None or not isinstance(weight, PackedTensor):
            return self.module
        parameters = {**self.module._parameters, "weight": weight.view_as(weight)}
        return with_parameters(self.module, parameters)

    def _takes(self, x: torch.Tensor, weight: Any) -> bool:
        return self.sources.are_current() and takes(x, weight)

    def _computed(self, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        return kept(convolution(x, weight, bias), x)


def forward_kind(module: nn.Module) -> type[PackedForward]:
    """The forward of a layer whose weight is packed."""
    return ConvolutionForward if is_packable_convolution(module) else LinearForward
