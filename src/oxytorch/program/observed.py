"""Programs that also show what layers take and give: for calibration, and to compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from . import passes
from .derived import Derived
from .passes.quantized_layers import Layers, Quantization, named
from .passes.smoothing import Geometry, Group
from .program import Program, Value
from .recorded import Run


class _Shown:
    """A run of a module's own code, as a program that returns further values. Raises CaptureError.

    names: of parameters, by their identities.
    """

    def __init__(self, run: Run, names: Mapping[int, str]) -> None:
        self._steps, self._required = run.written()
        self._externals = run.externals
        self._lasting = self._steps.inputs[run.count :]
        self._names = named(self._lasting, run.externals, names)

    def _show(self, values: Iterable[Value]) -> None:
        """Return these values too. What depends on weights alone is made once, and after writes."""
        steps, count = self._steps, len(self._steps.outputs)
        self._read = slice(count - len(self._required), count)
        self._places = {v: place for place, v in enumerate(dict.fromkeys(values), count)}
        steps.outputs = [*steps.outputs, *self._places]
        places = {value: place for place, value in enumerate(steps.inputs)}
        before, _ = passes.split(steps, self._lasting)
        self._taken = [places[value] for value in steps.inputs if value in places]
        self._derived = Derived(before, [places[v] for v in before.inputs])
        self._program = steps.program()

    def _values(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """What a call returns; None where its code read other values than it did then."""
        given = [*tensors, *self._externals]
        derived = self._derived(given)
        if derived is None:  # weights are written to all the time
            with torch.no_grad():
                derived = self._derived.run([given[place] for place in self._derived.places])
        found, _ = _run(self._program, [*(given[place] for place in self._taken), *derived])
        return found if all(map(torch.equal, found[self._read], self._required)) else None


def _run(program: Program, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    with torch.no_grad():
        return program([each.detach() for each in tensors])


class ObservedProgram(_Shown):
    """Shows the values whose ranges decide which bytes layers multiply.

    left: why layers cannot multiply bytes, by name.
    groups: layers by what they take.
    by_rows: those that need no ranges.
    shared: values that had better have one range, by name.
    """

    def __init__(self, run: Run, names: Mapping[int, str]) -> None:
        super().__init__(run, names)
        found = passes.points(self._steps, self._lasting, self._names)
        self.left, self.groups, self._points = found.left, found.groups, found.values
        self.by_rows, self.shared = found.by_rows, found.shared
        self._plain = self._steps.copy()
        self._show(found.values.values())

    @property
    def layers(self) -> list[str]:
        """The layers that can multiply bytes, in order."""
        return [name.removesuffix(INPUT) for name in self._points if name.endswith(INPUT)]

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """The values of a call, by name; None where its code read other values than it did then."""
        found = self._values(tensors)
        if found is None:
            return None
        return {name: found[self._places[value]] for name, value in self._points.items()}

    def weights(self, group: Group) -> list[tuple[Tensor, Geometry | None]]:
        """The weights of a group's layers as they are now, with the geometry of convolutions."""
        steps = self._plain.copy()
        steps.inputs = self._lasting
        steps.outputs = [weight for weight, _ in group.calls]
        steps.drop_unused()
        weights, _ = _run(steps.program(), self._externals)
        return [(w, geometry) for w, (_, geometry) in zip(weights, group.calls, strict=True)]


class ComparedProgram(_Shown):
    """Shows the squares of what layers take and give, and of the errors of bytes.

    layers: those that are computed with bytes beside.
    products: of a call of each layer, by name. compute: the layers whose errors are shown.
    """

    def __init__(self, run: Run, names: Mapping[int, str], layers: Layers) -> None:
        super().__init__(run, names)
        quantization = Quantization(layers, self._names)
        found = passes.compared_layers(self._steps, self._lasting, quantization)
        self.products = {name: each.products for name, each in found.items()}
        self._squares = {name: each.squares for name, each in found.items() if each.squares}
        self._show(value for each in self._squares.values() for value in each)

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, list[float]] | None:
        """The sums of squares of a call, by layer: see `Compared`; None where its code read other
        values than it did then."""
        found = self._values(tensors)
        if found is None:
            return None
        return {
            name: [float(found[self._places[value]]) for value in squares]
            for name, squares in self._squares.items()
        }


INPUT, OUTPUT = ".input", ".output"
"""The ends of the names of points: what a layer takes, and what it gives to a sum."""
