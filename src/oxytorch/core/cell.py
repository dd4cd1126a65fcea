"""What all tensors over one packed weight share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .packed import PackedTensor


class AliasPlace:
    """Where a tensor that was handed out is told of the cell that it has from now on.

    Not a weak reference to the tensor: torch swaps no tensors that have one.
    """

    __slots__ = ("__weakref__", "cell")

    def __init__(self) -> None:
        self.cell: Cell | None = None


class Cell:
    """The state that all tensors over one packed weight share.

    plain: the plain values, while they are the truth (`is_out`) or are kept beside the packed ones.
    is_out: whether the plain values are the truth, since they were asked for or written to.
    is_pinned: whether they stay it for good: what was handed out cannot be followed.
    keeps_plain: whether the plain values stay in memory beside the packed ones.
    clock: a tensor whose version counts the writes and the times that `is_out` changed.
    relatives: weights that are out, of all whose packed forms share memory with this one; None
        where there are no such weights.
    aliases: the places of tensors that operators handed out to users (`detach()`).
    """

    __slots__ = (
        "aliases",
        "clock",
        "is_out",
        "is_pinned",
        "keeps_plain",
        "lock",
        "plain",
        "relatives",
        "stored",
    )

    def __init__(self, plain: Tensor | None = None) -> None:
        self.plain = plain
        self.is_out = plain is not None
        self.is_pinned = False
        self.keeps_plain = False
        self.stored: Any = None
        self.relatives: list[PackedTensor] | None = None
        self.aliases: WeakSet[AliasPlace] = WeakSet()
        self.lock = threading.RLock()
        self.clock = _new_clock()

    def tick(self) -> None:
        torch.autograd.graph.increment_version(self.clock)


def _new_clock() -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.uint8, device="cpu")
