"""Programs that also return the values whose ranges decide which bytes layers multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import passes
from .passes.quantized import named
from .recorded import Run


class ObservedProgram:
    """A run of a module's own code, as a program that shows what its layers take.

    names: of parameters, by their identities. left: why layers cannot multiply bytes, by name.
    Raises CaptureError.
    """

    def __init__(self, run: Run, names: Mapping[int, str]) -> None:
        steps, self._required = run.written()
        lasting = steps.inputs[run.count :]
        points, self.left = passes.points(steps, lasting, named(lasting, run.externals, names))
        count = len(steps.outputs)
        self._read = slice(count - len(self._required), count)
        places = {value: place for place, value in enumerate(dict.fromkeys(points.values()), count)}
        self._places = {name: places[value] for name, value in points.items()}
        steps.outputs += places
        self._program = steps.program()
        self._externals = run.externals

    @property
    def layers(self) -> list[str]:
        """The layers that can multiply bytes, in order."""
        return [name.removesuffix(INPUT) for name in self._places if name.endswith(INPUT)]

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """The values of a call, by name; None where its code read other values than it did then."""
        with torch.no_grad():
            found, _ = self._program([*tensors, *(each.detach() for each in self._externals)])
        if not all(map(torch.equal, found[self._read], self._required)):
            return None
        return {name: found[place] for name, place in self._places.items()}


INPUT, OUTPUT = ".input", ".output"
"""The ends of the names of points: what a layer takes, and what it gives to a sum."""
