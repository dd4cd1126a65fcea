"""Layers beside linear ones whose weights become bytes: recurrent layers and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from ..core.packed import why_not_plain
from ..graph.forward import Forward, with_parameters
from ..graph.recognize import holds_its_parameters
from ..graph.recommendation import is_plain_bag
from ..graph.recurrent import with_weights
from ..ops.lstm import why_not_packed
from ..ops.quantized_linear import MOST_PRODUCTS
from ..optimize.passes import lstm
from ..optimize.passes.kernels import EmbeddingBagForward
from ..rewriting.changes import ChangeLog, ParameterSet
from ..rewriting.measure import Calls, about, first_win, numbers
from .byte_forwards import DTYPES, ByteRecurrentForward, ByteTableForward, counts_differ
from .byte_weights import ByteWeight, GruWeight, LstmWeight, TableWeight
from .configs import WeightConfig

RECURRENT: dict[type[nn.Module], type[ByteWeight]] = {nn.LSTM: LstmWeight, nn.GRU: GruWeight}
TABLES = (nn.EmbeddingBag, nn.Embedding)
USUAL_SEQUENCES = ((1, 1), (16, 1), (16, 8))
"""Steps and batch of the inputs that are timed."""
USUAL_BAGS = 512, 10
"""Bags, and indices of each, that are timed: the time of few is that of the call."""
LOOK_UPS = 16
"""Sets of indices that calls take in turn: those of one set would stay in a cache."""

_ROUNDING = 128 << 20
"""Bytes that rounding a table takes meanwhile, at most: it goes part by part."""

Packed = Mapping[str, ByteWeight]
"""Weights of a module by name."""


@dataclass(frozen=True)
class OtherLayer:
    """A layer whose weights can become bytes. kind: of these weights."""

    path: str
    module: nn.Module
    kind: type[ByteWeight]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Those that are replaced, by name."""
        found = {n: p for n, p in self.module._parameters.items() if n.startswith("weight")}
        return {name: weight for name, weight in found.items() if weight is not None}

    def name_of(self, name: str) -> str:
        """The path of a weight."""
        return f"{self.path}.{name}" if self.path else name

    def stored(self) -> int:
        """Bytes of the weights as they are stored."""
        forms = [self.kind.form(weight.shape).values() for weight in self.weights.values()]
        return sum(math.prod(size) * dtype.itemsize for form in forms for dtype, size in form)

    def needed(self) -> int:
        """The most bytes beside the plain weights while these are rounded and timed."""
        largest = max(weight.nbytes for weight in self.weights.values())
        packed = isinstance(self.module, nn.LSTM)  # beside which it is timed
        return self.stored() + (4 * largest if packed else min(2 * largest, _ROUNDING))

    def rounded(self) -> Packed:
        """The weights as bytes."""
        return {name: self.kind.from_dense(weight) for name, weight in self.weights.items()}


def other_layer(
    path: str,
    module: nn.Module,
    config: WeightConfig,
    holders: Mapping[int, Sequence[tuple[nn.Module, str]]],
) -> OtherLayer | str | None:
    """A layer that a configuration takes, or why it does not; None: it is none of these kinds.

    holders: the modules that hold each parameter, by its identity.
    """
    kind = RECURRENT.get(type(module)) or (TableWeight if type(module) in TABLES else None)
    if kind is None or not config.takes(module):
        return None
    name = type(module).__name__
    if config.group_size is not None or not config.symmetric:
        return f"{name}: groups and zero points are for linear layers"
    layer = OtherLayer(path, module, kind)
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for weight_name, weight in module._parameters.items():
        reason = why_not_plain(weight)
        if reason is None and weight is not None and weight.dtype not in DTYPES:
            reason = f"it is {str(weight.dtype).removeprefix('torch.')}"
        if reason is None and len(holders[id(weight)]) > 1:
            reason = "another module holds it too"
        if reason is not None:
            return f"{name}: of {weight_name}, {reason}"
    return _refusal(module) or layer


def _refusal(module: Any) -> str | None:
    """Why a layer of torch computes something that our kernels do not."""
    name = type(module).__name__
    if isinstance(module, nn.RNNBase):
        if module.proj_size:
            return f"{name} with projections"
        if not holds_its_parameters(module, module._flat_weights_names):
            return f"{name}: a weight is no parameter of it"
        if max(module.input_size, 2 * module.hidden_size) > MOST_PRODUCTS:
            return f"{name}: it sums more than {MOST_PRODUCTS} products"
        return None
    if module.max_norm is not None:
        return f"{name}: it changes its rows (max_norm)"
    if isinstance(module, nn.EmbeddingBag) and (not is_plain_bag(module) or counts_differ(module)):
        return f"{name}: the kernel sums or averages, without a padding index"
    return None


def pays(layer: OtherLayer, packed: Packed) -> bool:
    """Whether a layer of bytes is faster than the floating one that `optimize` would make."""
    if isinstance(layer.module, nn.Embedding):
        return True  # which is asked for by name, for memory
    if isinstance(layer.module, nn.RNNBase):
        return _recurrent_pays(layer.module, packed)
    return _bag_pays(layer.module, packed)


def _recurrent_pays(module: nn.RNNBase, packed: Packed) -> bool:
    parameters = {**module._parameters, **packed}
    ours = ByteRecurrentForward(with_weights(module, parameters))
    own = type(module).forward

    @cache
    def floating() -> Callable[[Tensor], Any]:
        plain: Any = {n: p.detach() for n, p in module._parameters.items() if p is not None}
        dtype = plain["weight_ih_l0"].dtype
        if isinstance(module, nn.LSTM) and why_not_packed(dtype) is None:
            return lstm.packed(module)
        other = with_weights(module, plain)
        return lambda x: own(other, x)

    dtype = module._parameters["weight_ih_l0"].dtype  # type: ignore[union-attr]

    def calls(steps: int, batch: int) -> Calls:
        x = numbers(steps, batch, module.input_size).to(dtype)
        x = x.transpose(0, 1) if module.batch_first else x
        return lambda: floating()(x)[0], lambda: ours(x)[0]

    form = module.hidden_size, module.num_layers, module.bidirectional, module.bias
    key = ("recurrent of bytes", type(module), about(module.input_size), form, dtype)
    return first_win(key, [calls(*size) for size in USUAL_SEQUENCES]) == 0


def _bag_pays(module: Any, packed: Packed) -> bool:
    plain: Any = dict(module._parameters)
    ours = ByteTableForward(with_parameters(module, {**plain, **packed}))
    floating = EmbeddingBagForward(with_parameters(module, plain))
    rows, width = plain["weight"].shape

    def calls(bags: int, length: int) -> Calls:
        sets, same = (cycle(_indices(rows, bags * length)) for _ in range(2))
        offsets = torch.arange(0, bags * length, length, device="cpu")
        if module.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([bags * length], device="cpu")])
        return lambda: floating(next(sets), offsets), lambda: ours(next(same), offsets)

    dtype = plain["weight"].dtype
    key = ("bag of bytes", about(rows), width, module.mode, dtype)
    return first_win(key, [calls(*USUAL_BAGS)]) == 0


def _indices(rows: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(rows, (count,), generator=generator, device="cpu") for _ in range(LOOK_UPS)
    ]


def install_other(
    log: ChangeLog,
    module: nn.Module,
    name: str,
    weight: ByteWeight,
    requires_grad: bool,
    is_shared: bool = False,
) -> None:
    """Put a weight of bytes into a module, which may have others already; is_shared: see
    `ParameterSet`."""
    parameter = weight.as_parameter(requires_grad)
    log.changes.append(ParameterSet(module, name, parameter, is_shared=is_shared))
    if isinstance(module.__dict__.get("forward"), (ByteRecurrentForward, ByteTableForward)):
        return
    log.prepare_for_packed(module)
    recurrent = isinstance(module, nn.RNNBase)
    forward: Forward = ByteRecurrentForward(module) if recurrent else ByteTableForward(module)
    log.set_forward(module, forward)


def sizes_of(layer: OtherLayer) -> Iterator[tuple[str, str, tuple[int, int], int]]:
    """The name, path, shape and bytes of each weight."""
    for name, weight in layer.weights.items():
        rows, columns = weight.shape
        is_table = layer.kind is TableWeight
        path = layer.path if is_table else layer.name_of(name)
        yield name, path, (rows, columns), weight.nbytes
