"""Who takes part in `oxytorch bench gpu-optim`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from oxytorch.benchmark.optim.contestants import Entrant, own_entrants
from oxytorch.benchmark.peers import optimizers

PEERS = {
    "foreach": "torch foreach",
    "fused": "torch fused",
    "optimi": "torch-optimi",
    "bitsandbytes": "bitsandbytes",
    "flashoptim": "FlashOptim",
    "oxytorch": "oxytorch",
}
"""Contestants in the order of the tables."""


def entrants(optimizer: str, peers: Sequence[str], formats: Sequence[str]) -> Iterator[Entrant]:
    """Everybody who is asked for and has the optimizer, absent ones too.

    A peer takes part in its formats, whichever are asked for of oxytorch.
    """
    for peer, label in PEERS.items():
        if peer not in peers:
            continue
        if peer == "oxytorch":
            yield from own_entrants(optimizer, formats)
            continue
        for kept in _formats_of(peer, optimizer):
            suffix = "" if kept == "float32" else f" {kept}"
            if peer in optimizers.PACKAGES:
                make = partial(optimizers.packaged, peer, optimizer, kept)
            else:
                how: dict[str, Any] = {peer: True}
                make = partial(optimizers.stock, optimizer, **how)
            # Its square roots and quotients are approximate: a change differs by 1.3e-4.
            allowed = 1e-3 if (peer, kept) == ("bitsandbytes", "float32") else 0.0
            yield Entrant(peer + suffix, label + suffix, kept, make, allowed)


def _formats_of(peer: str, optimizer: str) -> tuple[str, ...]:
    """The formats in which a peer has the optimizer."""
    if peer in optimizers.PACKAGES:
        return optimizers.PACKAGES[peer].get(optimizer, ())
    known = hasattr(torch.optim, optimizer)
    return ("float32", "bfloat16") if known and peer == "fused" else ("float32",) * known
