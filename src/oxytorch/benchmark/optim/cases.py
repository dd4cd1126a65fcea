"""What `oxytorch bench optim` measures: tensors, storage formats, optimizers and who makes them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Absent

Shapes = list[tuple[int, ...]]


def bert_shapes() -> Shapes:
    """The parameters of BERT-base (bert-base-uncased without its heads): 199 tensors."""
    width, inner = 768, 3072
    norm: Shapes = [(width,), (width,)]
    embeddings: Shapes = [(30522, width), (512, width), (2, width), *norm]
    square: Shapes = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    return [*embeddings, *layer * 12, *square]


def small_shapes() -> Shapes:
    """1000 small tensors: 500 matrices and 500 vectors."""
    return [shape for _ in range(500) for shape in ((256, 256), (256,))]


@dataclass(frozen=True)
class Case:
    """Tensors that an optimizer updates in one step."""

    name: str
    title: str
    shapes: Callable[[], Shapes]


CASES = {
    case.name: case
    for case in (
        Case("bert", "BERT-base", bert_shapes),
        Case("small", "1000 small tensors", small_shapes),
    )
}


@dataclass(frozen=True)
class Format:
    """How parameters and states are kept.

    Attributes:
        parameter_dtype: of parameters and gradients.
        options: of oxytorch's optimizers.
        allowed: how far three steps may be from float64, see `optim_runs.check`.
    """

    parameter_dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    allowed: float = 1e-4


_SPLIT = {"master_weights": "split"}
FORMATS = {
    "float32": Format(),
    "float32+bfloat16": Format(options={"state_dtype": torch.bfloat16}, allowed=0.05),
    "float32+int8": Format(options={"state_dtype": torch.int8}, allowed=0.15),
    "bfloat16": Format(torch.bfloat16, allowed=0.15),
    "split": Format(torch.bfloat16, _SPLIT),
    "split+bfloat16": Format(torch.bfloat16, {**_SPLIT, "state_dtype": torch.bfloat16}, 0.05),
    "split+int8": Format(torch.bfloat16, {**_SPLIT, "state_dtype": torch.int8}, 0.15),
}
"""Parameters, and states where they are kept otherwise than float32 (bfloat16: everything)."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Lamb": {"weight_decay": 0.01},
    "Lars": {"momentum": 0.9, "weight_decay": 1e-4, "eeta": 0.1},
    "Lion": {},
    "Adafactor": {},
}
"""Name of the class -> its arguments besides the learning rate."""

PEERS = {
    "foreach": "torch foreach",
    "fused": "torch fused",
    "predecessor": "predecessor",
    "oxytorch": "oxytorch",
}
"""Contestants in the order of the tables; oxytorch takes part once per format."""

LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Entrant:
    """One contestant: how its optimizer is made of a list of parameters.

    Attributes:
        name: the peer, for oxytorch followed by the format unless that is float32.
        format: name of the format of parameters and states.
        make: parameters -> optimizer; raises `Absent` where it cannot take part.
        allowed: how far three steps may be from float64; 0 means as far as the format allows.
    """

    name: str
    label: str
    format: str
    make: Callable[[Sequence[Tensor]], Optimizer]
    allowed: float = 0.0


def entrants(optimizer: str, peers: Sequence[str], formats: Sequence[str]) -> Iterator[Entrant]:
    """Everybody who is asked for, absent ones too."""
    makers: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
        "foreach": lambda parameters: stock(optimizer, parameters, foreach=True),
        "fused": lambda parameters: stock(optimizer, parameters, fused=True),
        "predecessor": lambda parameters: _predecessor(optimizer, parameters),
    }
    for peer, make in makers.items():
        if peer in peers:
            yield Entrant(peer, PEERS[peer], "float32", make)
    if "oxytorch" in peers:
        yield from own_entrants(optimizer, formats)


def own_entrants(optimizer: str, formats: Sequence[str]) -> Iterator[Entrant]:
    """oxytorch in every format."""
    for name in formats:
        suffix = "" if name == "float32" else f" {name}"
        yield Entrant(f"oxytorch{suffix}", f"oxytorch{suffix}", name, _own(optimizer, name))


def _own(optimizer: str, format_name: str) -> Callable[[Sequence[Tensor]], Optimizer]:
    return lambda parameters: own(optimizer, parameters, **FORMATS[format_name].options)


def own(optimizer: str, parameters: Sequence[Tensor], **options: Any) -> Optimizer:
    """oxytorch's optimizer of that name."""
    module = importlib.import_module("oxytorch.optim")
    if not hasattr(module, optimizer):
        raise Absent(f"this oxytorch has no {optimizer}")
    make = getattr(module, optimizer)
    result: Optimizer = make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer], **options)
    return result


def stock_class(optimizer: str) -> type[Optimizer]:
    """torch's class of that name."""
    found: type[Optimizer] | None = getattr(torch.optim, optimizer, None)
    if found is None:
        raise Absent(f"torch has no {optimizer}")
    return found


def stock(optimizer: str, parameters: Sequence[Tensor], **how: bool) -> Optimizer:
    """torch's optimizer of that name, in the way that `how` names."""
    make: Any = stock_class(optimizer)
    try:
        made: Optimizer = make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer], **how)
    except (TypeError, RuntimeError) as error:
        raise Absent(f"torch's {optimizer} does not take {', '.join(how)}=True") from error
    return made


def _predecessor(optimizer: str, parameters: Sequence[Tensor]) -> Optimizer:
    """The archived extension's fused step, as its `optimize` installs it."""
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        raise Absent("intel_extension_for_pytorch is not installed (archived; needs torch 2.8)")
    extension = importlib.import_module("intel_extension_for_pytorch")
    if optimizer not in ("SGD", "Adam", "Adagrad", "Lamb"):
        raise Absent(f"it has no fused {optimizer} on the CPU")
    make: Any = extension.optim._lamb.Lamb if optimizer == "Lamb" else stock_class(optimizer)
    made = make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer])
    model = nn.ParameterList(parameters).train()
    result: Optimizer = extension.optimize(
        model, optimizer=made, dtype=torch.float32, inplace=True, fuse_update_step=True
    )[1]
    return result
