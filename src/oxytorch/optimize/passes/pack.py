"""Pass `pack`: linear and convolution weights in oneDNN's blocked order, once and for all.

The plain copy is dropped: the parameter itself becomes a packed tensor, which looks like the plain
one to everything but the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.packed import PackedTensor, why_not_plain
from ...graph.patterns import is_packable_convolution
from ...ops._post_op import NO_POST_OP
from ...ops.convolution import Geometry, PackedConvolutionWeight, convolution
from ...ops.linear import PackedLinearWeight, linear, supports
from ..context import Context

SMALLEST_LINEAR = 32 << 10
"""Elements of a float32 linear weight below which a call of oneDNN costs more than it saves."""


def refusal(context: Context, module: nn.Module) -> str | None:
    """Return why a module's weight cannot be packed, or None if it can."""
    if not (is_packable_convolution(module) or context.recognizer.linear(module) is not None):
        return "has no packed form"
    weight = module._parameters.get("weight")
    reason = why_not_plain(weight)
    if reason is not None:
        return reason
    assert weight is not None
    dtype = context.target_dtype(module, weight)
    small = not is_packable_convolution(module) and weight.numel() < SMALLEST_LINEAR
    if small and dtype == torch.float32 and module not in context.folds:
        return f"{weight.numel()} weights are too few to gain"
    for owner, name in context.owners.get(id(weight), []):
        if owner is not module and (type(owner) is not type(module) or name != "weight"):
            return f"its weight is shared with {context.paths[owner]}, which is no such layer"
    return supports(dtype)


def run(context: Context) -> None:
    for module in context.open_modules():
        if not (is_packable_convolution(module) or context.recognizer.linear(module) is not None):
            continue
        reason = refusal(context, module)
        if reason is not None:
            if can_pack_beside(context, module):
                context.set_forward(module, LinearBesideForward(module))
                size = module._parameters["weight"].nbytes / 2**20  # type: ignore[union-attr]
                context.did("pack", module, f"Linear, beside the weight it shares: +{size:.1f} MiB")
            elif not _is_packed(module):
                context.left("pack", module, f"{type(module).__name__}: {reason}")
            continue
        _pack(context, module)


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), PackedTensor)


def _pack(context: Context, module: nn.Module) -> None:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    dtype = context.target_dtype(module, weight)
    folded = context.folds.get(module)
    scale = None if folded is None else folded.scale
    packed = nn.Parameter(
        _packed_weight(context, module, weight.detach(), dtype, scale), weight.requires_grad
    )
    for owner, name in context.owners[id(weight)]:
        context.set_parameter(owner, name, packed)
        _keep_plain_state(context, owner)
        if bias is not None and owner._parameters["bias"].dtype != dtype:  # type: ignore[union-attr]
            _cast_bias(context, owner, dtype)
        context.set_forward(
            owner, LinearForward(owner) if _is_linear(packed) else ConvolutionForward(owner)
        )
    if folded is not None:
        folded.bias = folded.bias.to(dtype)
        for part in (folded.layer, folded.norm):
            handle = part.register_load_state_dict_post_hook(Refresh(folded))  # type: ignore[no-untyped-call]
            context.add_hook(part, "_load_state_dict_post_hooks", handle)
    cast = "" if dtype == weight.dtype else f" as {str(dtype).removeprefix('torch.')}"
    context.did("pack", module, f"{type(module).__name__}{cast}")


def _packed_weight(
    context: Context,
    module: nn.Module,
    weight: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
) -> PackedTensor:
    form = context.recognizer.linear(module)
    if form is not None:
        return PackedLinearWeight(weight, dtype=dtype, transposed=form.transposed, scale=scale)
    geometry = Geometry(module.stride, module.padding, module.dilation, module.groups)  # type: ignore[arg-type]
    size = context.observed.input_sizes.get(module)
    if size is not None and len(size) != weight.dim():
        size = None
    return PackedConvolutionWeight(weight, geometry, dtype=dtype, scale=scale, input_size=size)


def _cast_bias(context: Context, module: nn.Module, dtype: torch.dtype) -> None:
    bias = module._parameters["bias"]
    assert bias is not None
    context.set_parameter(module, "bias", nn.Parameter(bias.detach().to(dtype), bias.requires_grad))


def _is_linear(packed: nn.Parameter) -> bool:
    return isinstance(packed, PackedLinearWeight)


def _keep_plain_state(context: Context, module: nn.Module) -> None:
    handle = module.register_state_dict_post_hook(plain_state)  # type: ignore[no-untyped-call]
    context.add_hook(module, "_state_dict_hooks", handle)


def plain_state(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Give the state dictionary plain tensors where the module holds packed ones."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedTensor) and prefix + name in state:
            state[prefix + name] = parameter.dense()


class Refresh:
    """After new values were loaded, folds the normalization again."""

    def __init__(self, folded: Any) -> None:
        self.folded = folded

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.folded.refresh()


class LinearForward:
    """The forward of a linear layer with a packed weight."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.module._parameters
        weight: torch.Tensor | None = parameters["weight"]
        bias = parameters["bias"]
        if type(weight) is PackedLinearWeight:
            if weight.scale is None:
                return linear(x, weight, bias)
            if not weight.keeps_plain:
                return _unscaled(linear(x, weight), weight.scale, bias, -1)
        return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]


def can_pack_beside(context: Context, module: nn.Module) -> bool:
    """Whether a linear layer shares its weight with an embedding, which needs the plain one."""
    weight = module._parameters.get("weight")
    if type(module) is not nn.Linear or type(weight) is not nn.Parameter:
        return False
    owners = [owner for owner, _ in context.owners.get(id(weight), []) if owner is not module]
    return (
        bool(owners)
        and all(type(owner) in (nn.Linear, nn.Embedding) for owner in owners)
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST_LINEAR
        and supports(weight.dtype) is None
    )


class LinearBesideForward:
    """The forward of a linear layer whose weight an embedding shares (a tied output layer).

    The plain weight stays the only parameter; the packed one is a copy, made at the first call and
    anew when the parameter has been replaced or written to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._source: torch.Tensor | None = None
        self._version = -1
        self._packed: PackedLinearWeight | None = None

    def _pack(self) -> PackedLinearWeight:
        weight = self.module._parameters["weight"]
        assert weight is not None
        self._source, self._version = weight, weight._version
        self._packed = PackedLinearWeight(weight.detach())
        return self._packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.module._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        if x.dtype != weight.dtype:
            x = x.to(weight.dtype)
        if weight.is_inference() or (
            torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        ):
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        packed = self._packed
        if packed is None or weight is not self._source or weight._version != self._version:
            packed = self._pack()
        return linear(x, packed, bias)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "_source": None, "_version": -1, "_packed": None}


class ConvolutionForward:
    """The forward of a convolution with a packed weight."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.module._parameters
        weight: torch.Tensor | None = parameters["weight"]
        bias = parameters["bias"]
        if type(weight) is PackedConvolutionWeight:
            if weight.scale is None:
                return convolution(x, weight, bias, NO_POST_OP)
            if not weight.keeps_plain:
                return _unscaled(convolution(x, weight), weight.scale, bias, 1 - weight.dim())
        return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]


def _unscaled(
    result: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dim: int
) -> torch.Tensor:
    """A layer's own result from the one with the normalization's factor in its weight.

    Needed where the layer is called outside of the region that it was fused in. dim: the channel
    dimension, counted from the end.
    """
    shape = [-1] + [1] * (-dim - 1)
    plain = result / scale.reshape(shape).to(result.dtype)
    return plain if bias is None else plain + bias.reshape(shape)
