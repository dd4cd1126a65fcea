"""Puts a decoder layer's weights into panels, joined as its products need them, one by one.

The modules keep parameters of the same shapes and values: views of the joined weights where panels
allow it, else tensors that look them up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.looked_up import RowsWeight
from ..core.own_storage import is_part
from ..core.packed import PackedTensor
from ..ops.panels import PanelWeight
from ..ops.panels.layout import OUTPUTS
from ..quantization.configs import WeightConfig
from ..quantization.joining import whole_of
from ..quantization.layers import PanelForward, RoundingForward
from ..quantization.weights import ReorderedPanelWeight, quantized
from ..rewriting.changes import BufferSet, ChangeLog, ParameterSet, Untied
from .layer import Product
from .matching import Unmatched
from .plan import ProductPlan, Products
from .tied import TiedEmbeddingForward, TiedHeadForward, TiedState
from .weights import StackedWeight


class OwnForward(RoundingForward):
    """The forward of a module whose weights only a fused layer reads packed: its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)


@dataclass(eq=False)
class Packer(Products):
    """Makes products of a model's own weights and leaves in its modules what looks like before.

    model: all of it.
    dtype: of the result.
    config: how weights are quantized, or None: panels of bfloat16, or plain weights where dtype is
        float32. Weights that are packed already keep their form.
    separate: the model is a copy that still shares its tensors with another; what is not packed is
        copied too.
    keeps: whether replaced parameters stay in memory until all is done, so that the model can be
        given back as it was.
    """

    log: ChangeLog
    model: nn.Module
    dtype: torch.dtype
    config: WeightConfig | None
    separate: bool
    keeps: bool
    _made: set[nn.Parameter] = field(init=False, default_factory=set)
    _owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._owners = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(parameter, []).append((module, name))

    def of(self, layer: nn.Module, plan: ProductPlan) -> Product:
        modules = [layer.get_submodule(path) for path in plan.paths]
        if plan.grouped:
            return self._sorted(modules[0], plan)
        order = self.order(layer, plan)
        parts = [self.packed(module, plan) for module in modules]
        if plan.gated and len(parts) == 1:
            parts = halves(parts[0])
        whole = joined(parts, plan.gated)
        sizes = [module.get_parameter("weight").shape for module in modules]
        rows = [size[1 if plan.transposed else 0] for size in sizes]
        for module, (begin, end) in zip(modules, _spans(rows), strict=True):
            part = part_of(whole, begin, end)
            self.set_weight(module, "weight", reordered(part, plan.transposed, order))
        return Product(whole, self._bias(modules, rows), plan.gated, order)

    def order(self, layer: nn.Module, plan: ProductPlan) -> Tensor | None:
        """The order of inputs of weights that are packed already (see `ReorderedPanelWeight`).

        Raises Unmatched where layers that are to be one product are not packed alike.
        """
        found = [
            self._form(layer.get_submodule(path).get_parameter("weight")) for path in plan.paths
        ]
        form, order = found[0]
        for other, its in found[1:]:
            same = its is order or (
                its is not None and order is not None and torch.equal(its, order)
            )
            if other != form or not same:
                raise Unmatched(f"{' and '.join(plan.paths)} are packed in different ways")
        return order

    def _form(self, weight: Tensor) -> tuple[tuple[Any, ...], Tensor | None]:
        """How a weight is or will be packed, and the order of its inputs."""
        order = weight.order if isinstance(weight, ReorderedPanelWeight) else None
        stored = weight.packed if isinstance(weight, ReorderedPanelWeight) else weight
        if isinstance(stored, PanelWeight):
            symmetric = stored.zero_points is None
            form = (
                stored.format,
                stored.group_size,
                stored.dtype,
                stored.activation_dtype,
                symmetric,
            )
            return form, order
        config = self.config
        if config is None:
            return ("bf16", None, self.dtype, None, True), order
        # One group is the same as none.
        size = None if config.group_size == stored.shape[-1] else config.group_size
        return (config.format, size, self.dtype, config.activation_dtype, config.symmetric), order

    def stacked(self, layer: nn.Module, path: str, gated: bool) -> list[Product]:
        owner = layer.get_submodule(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        weights = owner.get_parameter(name).detach()
        wholes = []
        for index in range(weights.shape[0]):
            weight = self.pack(weights[index], f"{path}[{index}]")
            wholes.append(joined(halves(weight), True) if gated else weight)
        if isinstance(wholes[0], PanelWeight):
            tensor: Tensor = StackedWeight(wholes)  # type: ignore[arg-type]
        else:
            tensor = torch.stack(wholes)
            wholes = [*tensor]
        del weights
        self.set_weight(owner, name, tensor)
        return [Product(weight, None, gated) for weight in wholes]

    def own(self, tensor: Tensor) -> Tensor:
        """A plain tensor in the dtype of the result."""
        return tensor.detach().to(self.dtype, copy=self.separate)

    def packed(self, module: nn.Module, plan: ProductPlan) -> Tensor:
        """A module's weight [out, in] as it is to be stored."""
        weight = module.get_parameter("weight")
        if isinstance(weight, ReorderedPanelWeight):
            return weight.packed
        if isinstance(weight, PackedTensor):
            return weight
        values = weight.detach()
        return self.pack(values.t() if plan.transposed else values, plan.paths[0])

    def pack(self, values: Tensor, name: str) -> Tensor:
        """A plain weight [out, in] as it is to be stored."""
        if self.config is not None:
            result = quantized(values.to(self.dtype), self.config, f"{name}.weight")
            return result
        if self.dtype == torch.bfloat16:
            return PanelWeight.from_dense(values)
        own = self.own(values)
        return own if own.t().is_contiguous() else own.contiguous()

    def single(self, module: nn.Module, transposed: bool, name: str) -> None:
        """Packs the weight of a linear layer that belongs to no product."""
        plan = ProductPlan((name,), transposed)
        whole = self.packed(module, plan)
        self.set_weight(module, "weight", reordered(whole, transposed, None))
        self._set_bias(module)

    def _set_bias(self, module: nn.Module) -> Tensor | None:
        """Gives a layer of one weight its bias in the dtype of the result, and others that hold
        the same one with it."""
        bias = module._parameters.get("bias")
        if bias is None or bias in self._made:
            return bias
        return self._cast(module, "bias", bias)

    def _cast(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Gives a parameter the dtype of the result, for all that hold it."""
        own = nn.Parameter(self.own(parameter), parameter.requires_grad)
        owners = self._owners.get(parameter)
        return self._replace(module, name, own, owners=owners)

    def set_weight(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Replaces a parameter by one of the same values; packed ones get a forward and a hook."""
        already = "forward" in module.__dict__
        before = module._parameters[name]
        assert before is not None
        # Not `detach()` of a plain one: parts of a joined weight count their writes apart, so that
        # autograd does not take a write to one for a write to all.
        values = tensor.data if type(tensor) is Tensor else tensor.detach()
        own = nn.Parameter(values, before.requires_grad)
        self._replace(module, name, own, is_shared=len(self._owners.get(before, ())) > 1)
        if isinstance(tensor, PackedTensor) or is_part(tensor):
            self.log.prepare_for_packed(module)
        if isinstance(tensor, PackedTensor) and not already:
            is_panels = isinstance(tensor, (PanelWeight, ReorderedPanelWeight))
            kind = PanelForward if is_panels else OwnForward
            self.log.set_forward(module, kind(module))

    def _replace(
        self, module: nn.Module, name: str, parameter: nn.Parameter, **options: Any
    ) -> nn.Parameter:
        change = ParameterSet(module, name, parameter, keeps_before=True, **options)
        self.log.changes.append(change)
        made = module._parameters[name]
        assert made is not None
        self._made.add(made)
        return made

    def give_back(self, begin: int) -> None:
        """Undoes the changes from a place in the log on: parameters are the user's again."""
        undone = [each for each in self.log.changes[begin:] if isinstance(each, ParameterSet)]
        given = (each.module._parameters.get(each.name) for each in undone)
        self._made.difference_update(own for own in given if own is not None)
        self.log.undo(begin)

    def head(self, module: nn.Module, transposed: bool, model: nn.Module) -> None:
        """Packs the output head; an embedding that shares its weight keeps the plain one."""
        weight = module._parameters["weight"]
        others = [
            other
            for other in model.modules()
            if other is not module and any(p is weight for p in other._parameters.values())
        ]
        if others and self.config is None and self.dtype == torch.float32:
            return  # it reads the plain weight as it is
        if not others or "weight" not in others[0]._parameters:
            self.single(module, transposed, "the output head")
            return
        whole = self.packed(module, ProductPlan(("the output head",), transposed))
        stored = reordered(whole, transposed, None)
        own = nn.Parameter(stored, requires_grad=False)
        self.log.changes.append(Untied(module, "weight", own, (others[0], "weight")))
        self.log.prepare_for_packed(module)
        tied_state = TiedState(others[0])
        handle = module.register_state_dict_post_hook(tied_state)  # type: ignore[no-untyped-call]
        self.log.add_hook(module, "_state_dict_hooks", handle)
        forward = TiedHeadForward(module, others[0])
        self.log.set_forward(module, forward)
        if "forward" not in others[0].__dict__:
            self.log.set_forward(others[0], TiedEmbeddingForward(others[0], forward))
        self._set_bias(module)

    def cast_rest(self, part: nn.Module, packed: set[str], stacked: set[str]) -> None:
        """Gives the other floating parameters of `part` the dtype of the result.

        packed: paths of modules, and stacked: of parameters, that are packed on their own.
        """
        for path, module in part.named_modules():
            if path in packed:
                continue
            for name, parameter in [*module._parameters.items()]:
                if parameter is None or isinstance(parameter, PackedTensor):
                    continue
                if f"{path}.{name}" in stacked:
                    continue
                if not parameter.is_floating_point() or parameter in self._made:
                    continue
                if self.separate or parameter.dtype != self.dtype:
                    self._cast(module, name, parameter)

    def cast_buffers(self, model: nn.Module, width: int) -> None:
        """Casts buffers as `from_pretrained(dtype=...)` does: those of the state dictionary, but
        for what the model keeps in float32.

        Of others, tables of positions, [..., width], since the embeddings that they are added to
        are cast, and those that lose nothing, such as masks of zeros and ones, since they are
        multiplied by what is cast. The rest keeps its dtype: angles want all the digits that they
        have.
        """
        kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        is_kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in kept) or "(?!)").search
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point() or buffer.dtype == self.dtype:
                    continue
                is_table = buffer.dim() > 1 and buffer.shape[-1] == width
                is_saved = name not in module._non_persistent_buffers_set
                cast = buffer.detach().to(self.dtype)
                loses = is_saved or not torch.equal(cast.to(buffer.dtype), buffer)
                if is_table or not loses or (is_saved and not is_kept(f"{path}.{name}")):
                    self.log.changes.append(BufferSet(module, name, cast))

    def _sorted(self, module: nn.Module, plan: ProductPlan) -> Product:
        weight = module.get_parameter("weight").detach()
        values = weight.dense() if isinstance(weight, PackedTensor) else weight
        rows = plan.rows(values.shape[0])
        assert rows is not None
        whole = self.pack(values[rows], plan.paths[0])
        inverse = torch.empty_like(rows)
        inverse[rows] = torch.arange(len(rows), device="cpu")
        self.set_weight(module, "weight", RowsWeight(whole, inverse))
        bias = self._set_bias(module)
        if bias is None:
            return Product(whole)
        return Product(whole, bias.detach()[rows], sorted_from=(module, rows))

    def _bias(self, modules: list[nn.Module], rows: list[int]) -> Tensor | None:
        found = [module._parameters.get("bias") for module in modules]
        if all(bias is None for bias in found):
            return None
        whole = torch.cat(
            [
                torch.zeros(count, dtype=self.dtype, device="cpu")
                if bias is None
                else bias.detach().to(self.dtype)
                for bias, count in zip(found, rows, strict=True)
            ]
        )
        for module, bias, (begin, end) in zip(modules, found, _spans(rows), strict=True):
            if bias is not None:
                self.set_weight(module, "bias", whole[begin:end])
        return whole


def _spans(rows: list[int]) -> list[tuple[int, int]]:
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [(end - count, end) for end, count in zip(ends, rows, strict=True)]


def reordered(weight: Tensor, transposed: bool, order: Tensor | None) -> Tensor:
    """A weight [out, in] in the order in which its module keeps it, one that looks contiguous."""
    if not transposed and order is None:
        return weight
    if isinstance(weight, PanelWeight):
        return ReorderedPanelWeight(weight, transposed, order)
    if isinstance(weight, RowsWeight):
        return RowsWeight(weight.packed, weight.places, transposed, order)
    if order is None and weight.t().is_contiguous():
        return weight.t()
    return RowsWeight(weight, torch.arange(len(weight), device="cpu"), transposed, order)


def halves(weight: Tensor) -> list[Tensor]:
    """The upper and the lower half of a weight, packed or plain."""
    half = weight.shape[0] // 2
    if not isinstance(weight, PanelWeight):
        return [weight[:half], weight[half:]]
    if half % OUTPUTS == 0 or weight.is_gated:
        return [weight.part(0, half), weight.part(half, 2 * half)]
    if weight.format == "bf16":
        return [PanelWeight.from_dense(part) for part in weight.dense().chunk(2)]
    codes, scales, zero_points = weight.codes()
    found = []
    for part in (slice(0, half), slice(half, 2 * half)):
        zero = None if zero_points is None else zero_points[part]
        made = PanelWeight.from_codes(
            weight.format,
            codes[part],
            scales[part],
            zero,
            dtype=weight.dtype,
            exact_scales=True,
        )
        made.activation_dtype = weight.activation_dtype
        found.append(made)
    return found  # type: ignore[return-value]


def joined(parts: list[Tensor], gated: bool) -> Tensor:
    """Several weights as one."""
    if len(parts) == 1:
        return parts[0]
    packed = [part for part in parts if isinstance(part, PanelWeight)]
    if len(packed) != len(parts):
        return torch.cat([p.dense() if isinstance(p, PackedTensor) else p for p in parts])
    whole = whole_of(packed, gated)  # they may lie side by side already, in a mapped file
    if whole is not None:
        return whole
    return PanelWeight.gated(*packed) if gated else PanelWeight.joined(packed)


def part_of(whole: Tensor, begin: int, end: int) -> Tensor:
    """Rows begin to end of a joined weight, over the same memory."""
    if isinstance(whole, PanelWeight) and whole.is_gated and end - begin == whole.shape[0]:
        return RowsWeight(
            whole, torch.arange(end, device="cpu")
        )  # its plain product is no epilogue of `linear`
    if (begin, end) == (0, whole.shape[0]):
        return whole
    if not isinstance(whole, PanelWeight):
        return whole[begin:end]
    fills_panels = begin % OUTPUTS == 0 and (end % OUTPUTS == 0 or end == whole.shape[0])
    if whole.is_gated or fills_panels:
        return whole.part(begin, end)
    return RowsWeight(whole, torch.arange(begin, end, device="cpu"))
