"""Values of a program that are made of its lasting inputs, once and again after a write to them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..core.sources import Places
from .program import Program

MOST_IN_A_ROW = 3
"""Calls, each after a write, upon which values are made no more until a call finds no write."""

_Noted = tuple[list[Tensor], Places, list[Tensor] | None]
"""The inputs, how they were, and the values that were made of them, if any were."""


class Derived:
    """The results of a program of lasting inputs, which are what they would be if it ran now.

    program: of these inputs. places: of these among the arguments of a call.
    """

    def __init__(self, program: Program, places: Sequence[int]) -> None:
        self.program = program
        self.places = [*places]
        self._lock = threading.Lock()
        self._noted: _Noted | None = None
        self._misses = 0

    def __call__(self, arguments: Sequence[Any]) -> list[Tensor] | None:
        """The values for a call; None where inputs are written to all the time, or do not tell."""
        given = [arguments[place] for place in self.places]
        values = self._known(given)
        return self._make(given) if values is None else values

    def _known(self, given: list[Tensor]) -> list[Tensor] | None:
        """The values that were made of these inputs as they are now."""
        noted = self._noted  # which another thread may replace
        if noted is None or noted[2] is None or not _is_current(noted, given):
            return None
        self._misses = 0
        return noted[2]

    def _make(self, given: list[Tensor]) -> list[Tensor] | None:
        if any(tensor.is_inference() for tensor in given):
            return None  # which do not count the writes to them
        with self._lock, torch.no_grad():
            values = self._known(given)
            if values is not None:  # another thread has found the same write
                return values
            is_rare = self._misses < MOST_IN_A_ROW or _is_current(self._noted, given)
            self._misses += 1
            places = Places()
            for tensor in given:
                places.add_tensor(tensor)
            places.close()
            # Views of the parameters themselves would keep them from being swapped.
            values = self.program([each.detach() for each in given])[0] if is_rare else None
            self._noted = given, places, values
            return values


def _is_current(noted: _Noted | None, given: list[Tensor]) -> bool:
    return noted is not None and all(map(is_, noted[0], given)) and noted[1].are_current()
