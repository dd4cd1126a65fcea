"""Captured programs with their weights as constants, and what depends on these alone computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tensor_file import DTYPES
from .model import Interface, ProgramModel
from .passes import improve, split
from .passes.editor import Note
from .passes.quantized_layers import Layers, Quantization
from .program import Program, Steps, Value, values_of

DERIVED = "derived"
"""The last part of the name of what is made of weights; the first one's name comes before it."""


@dataclass(frozen=True)
class Captured:
    """The steps of an exported program as they were captured, before any pass.

    weights: its parameters and buffers, by the values that stand for them; names: theirs.
    layers: those that multiply bytes.
    """

    steps: Steps
    weights: dict[Value, Tensor]
    names: dict[Value, str]
    layers: Layers | None = None

    def improved(self, storable: bool = False) -> tuple[Steps, Steps, list[Note]]:
        """The steps after all passes, those that are done once, and what the passes did.

        storable: whether packed weights have to be plain tensors.
        """
        steps = self.steps.copy()
        inputs = steps.inputs
        lasting = [] if steps.has_effect else [*self.weights]
        steps.inputs = [*inputs, *self.weights]
        steps.constants = {v: t for v, t in steps.constants.items() if v not in self.weights}
        layers = self.layers
        quantization = None if layers is None else Quantization(layers, self.names)
        known = self.weights if lasting else None
        notes = improve(steps, lasting, storable, quantization=quantization, known=known)
        before, derived = split(steps, lasting) if lasting else (Steps(), [])
        steps.inputs = [*inputs, *derived]
        steps.constants |= self.weights
        steps.drop_unused()
        return steps, before, notes

    def model(
        self, interface: Interface, state: Mapping[str, Tensor], storable: bool
    ) -> ProgramModel:
        """The model with these steps, improved. state: by name, the buffers that it writes to."""
        program, names = self.program(storable)
        is_plain = all(each.layout is torch.strided for each in program.constants)
        again = None if is_plain else self.storable_program
        return ProgramModel(program, interface, [*state.values()], (*names, *state), again)

    def storable_program(self) -> tuple[Program, tuple[str, ...]]:
        """The program whose packed weights are plain tensors, and the names of its constants."""
        return self.program(storable=True)

    def program(self, storable: bool) -> tuple[Program, tuple[str, ...]]:
        """The program after all passes, and the names of its constants.

        What depends on weights alone is a constant, and weights that nothing else takes are none.
        """
        with torch.no_grad():
            steps, before, _ = self.improved(storable)
            _compute(steps, before, self.weights)
        makers = {value: step for step in before.steps for value in step.results}

        def name_of(value: Value) -> str:
            first = value
            while first in makers:
                first = next(values_of(makers[first].arguments))
            name = self.names.get(first, "constant")
            return name if first is value else f"{name}.{DERIVED}"

        return steps.program(), tuple(map(name_of, steps.constants))


def _compute(steps: Steps, before: Steps, weights: Mapping[Value, Tensor]) -> None:
    """Make constants of what `before` makes of weights, where that takes memory of its own.

    What shares the memory of a weight, repeats its own, or has a dtype that files do not hold is
    made at each call.
    """
    if not before.outputs:
        return
    made, _ = before.program()([weights[value] for value in before.inputs])
    found = dict(zip(before.outputs, made, strict=True))
    taken = {_address(tensor) for tensor in weights.values()}
    again = before.copy()
    again.outputs = [value for value, tensor in found.items() if not _is_own(tensor, taken)]
    again.drop_unused()
    remade = {value for step in again.steps for value in step.results}
    steps.inputs = [value for value in steps.inputs if value not in found]
    steps.constants |= {value: found[value] for value in found if value not in remade}
    steps.constants |= again.constants
    steps.constants |= {value: weights[value] for value in before.inputs}
    steps.steps = [*again.steps, *steps.steps]
    steps.drop_unused()


def _is_own(tensor: Tensor, taken: Sequence[int] | set[int]) -> bool:
    if tensor.layout is not torch.strided:
        return True
    is_whole = tensor.untyped_storage().nbytes() >= tensor.nbytes
    return is_whole and tensor.dtype in DTYPES.values() and _address(tensor) not in taken


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
