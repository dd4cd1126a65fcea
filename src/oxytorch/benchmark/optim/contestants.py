"""Who takes part in `oxytorch bench optim`: oxytorch in every format, and others beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from oxytorch import optim
from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.optim.cases import FORMATS, LEARNING_RATE, OPTIMIZERS
from oxytorch.benchmark.peers.optimizers import stock
from oxytorch.benchmark.peers.predecessor import predecessor_step

PEERS = {
    "foreach": "torch foreach",
    "fused": "torch fused",
    "predecessor": "predecessor",
    "oxytorch": "oxytorch",
}
"""Contestants in the order of the tables; oxytorch takes part once per format."""


@dataclass(frozen=True)
class Entrant:
    """One contestant: how its optimizer is made of a list of parameters.

    Attributes:
        name: the peer, followed by the format unless that is float32.
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
        "foreach": partial(stock, optimizer, foreach=True),
        "fused": partial(stock, optimizer, fused=True),
        "predecessor": partial(predecessor_step, optimizer),
    }
    for peer, make in makers.items():
        if peer in peers:
            yield Entrant(peer, PEERS[peer], "float32", make)
    if "oxytorch" in peers:
        yield from own_entrants(optimizer, formats)


def own_entrants(optimizer: str, formats: Sequence[str]) -> Iterator[Entrant]:
    """oxytorch in every format."""
    for name in formats:
        own_name = "oxytorch" if name == "float32" else f"oxytorch {name}"
        yield Entrant(own_name, own_name, name, partial(own, optimizer, **FORMATS[name].options))


def own(optimizer: str, parameters: Sequence[Tensor], **options: Any) -> Optimizer:
    """oxytorch's optimizer of that name."""
    make: Any = getattr(optim, optimizer, None)
    if make is None:
        raise Absent(f"this oxytorch has no {optimizer}")
    made: Optimizer = make(parameters, lr=LEARNING_RATE, **OPTIMIZERS[optimizer], **options)
    return made
