"""Values of a program that are made of its lasting inputs, once and again after a write to them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.placement import trim_heap
from ..core.sources import Places
from .program import Program, Step, Steps, Value

MOST_IN_A_ROW = 3
"""Calls, each after a write, upon which values are made no more until a call finds no write."""

LARGE = 64 << 20
"""Bytes of inputs from which on values are made piece by piece."""
LEAST_PIECE, MOST_PIECES = 16 << 20, 16
"""Bytes of inputs after which what is free in the heap goes back to the system, and how often."""

_Noted = tuple[list[Tensor], Places, list[Tensor] | None]
"""The inputs, how they were, and the values that were made of them, if any were."""


class Derived:
    """The results of a program of lasting inputs, which are what they would be if it ran now.

    steps: of these inputs.
    places: of these among the arguments of a call.
    """

    def __init__(self, steps: Steps, places: Sequence[int]) -> None:
        self.places = [*places]
        self._steps = steps
        self.program = steps.program()
        self._pieces: list[_Piece] | None = None
        self._lock = threading.Lock()
        self._noted: _Noted | None = None
        self._misses = 0

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Make the values of inputs, whatever is known.

        What lies between two weights' temporary values would keep the heap from using these for the
        next weight: large weights are made one after the other, and free memory is given back.
        """
        given = [each.detach() for each in given]  # views of the parameters keep them from a swap
        total = sum(tensor.nbytes for tensor in given)
        if total < LARGE:
            return self.program(given)[0]
        if self._pieces is None:
            self._pieces = _pieces(self._steps)
        values: dict[int, Tensor] = {}
        left = 0
        trim_heap()
        for piece in self._pieces:
            own = [given[place] for place in piece.inputs]
            values.update(zip(piece.outputs, piece.program(own)[0], strict=True))
            left += sum(tensor.nbytes for tensor in own)
            if left >= max(LEAST_PIECE, total // MOST_PIECES):
                left = 0
                trim_heap()
        return [values[place] for place in range(len(values))]

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
            values = self.run(given) if is_rare else None
            self._noted = given, places, values
            return values


def _is_current(noted: _Noted | None, given: list[Tensor]) -> bool:
    return noted is not None and all(map(is_, noted[0], given)) and noted[1].are_current()


class _Piece(NamedTuple):
    """Steps that share no value with others. inputs, outputs: the places of theirs among all."""

    program: Program
    inputs: list[int]
    outputs: list[int]


def _pieces(steps: Steps) -> list[_Piece]:
    """The steps in pieces that share none of the values that they make, in order."""
    parents = [*range(len(steps.steps))]

    def first(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    makers: dict[Value | None, int] = {}
    for number, step in enumerate(steps.steps):
        for taken in step.taken:
            if taken in makers:
                one, other = sorted((first(makers[taken]), first(number)))
                parents[other] = one
        makers.update(dict.fromkeys(step.results, number))
    together: dict[int, list[Step]] = {}
    for number, step in enumerate(steps.steps):
        together.setdefault(first(number), []).append(step)
    return [_piece(steps, own) for own in together.values()]


def _piece(steps: Steps, own: Sequence[Step]) -> _Piece:
    taken = {value for step in own for value in step.taken}
    made = {value for step in own for value in step.results}
    inputs, outputs = _places_in(steps.inputs, taken), _places_in(steps.outputs, made)
    constants = {value: tensor for value, tensor in steps.constants.items() if value in taken}
    results = [steps.outputs[place] for place in outputs]
    given = [steps.inputs[place] for place in inputs]
    return _Piece(Steps(given, constants, [*own], results).program(), inputs, outputs)


def _places_in(values: Iterable[Value], some: set[Any]) -> list[int]:
    return [place for place, value in enumerate(values) if value in some]
