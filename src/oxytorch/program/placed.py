"""A program that takes and returns values in the order of the graph that it was made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..core.modes import is_unseen
from ..core.watched import PLAIN
from .capture import Given, Outputs
from .derived import Derived
from .passes import improve, left_out, split
from .passes.convolution_times import PACKED, PACKED_TRANSPOSED
from .passes.quantized_layers import Quantization
from .program import Step, Steps, Value


class UnsettledError(Exception):
    """Lasting inputs are written to all the time: nothing is made of them for now."""


class Placed:
    """Improves steps and calls them with arguments in any order.

    outputs: what the outputs are, in order.
    lasting: the inputs that seldom change; what is made of these alone is made once.
    required: what the last outputs of `steps`, which are not among `outputs`, must be at each call.
    quantization: which layers multiply bytes.

    packs_by_size: whether it has weights that are packed for the sizes of what their layers take.
    left_out: the passes that failed, and why.
    """

    def __init__(
        self,
        steps: Steps,
        outputs: Outputs,
        lasting: Sequence[Value],
        required: Sequence[Tensor] = (),
        quantization: Quantization | None = None,
    ) -> None:
        self._outputs = outputs
        self._is_plain = all(isinstance(v, Value) and not v.is_size for v in outputs)
        places = {value: place for place, value in enumerate(steps.inputs)}
        with _disable_current_modes():  # under which constants would be tensors without values
            steps = steps.copy()
            notes = improve(steps, lasting, quantization=quantization)
            self.left_out = left_out(notes)
            before, derived = split(steps, lasting)
            self._is_below = not steps.has_effect and not _shows_inputs(steps)
            _require(steps, required)
            self.packs_by_size = any(
                step.target.startswith((PACKED, PACKED_TRANSPOSED)) for step in steps.steps
            )
            self.program = steps.program()
            taken = [value for value in steps.inputs if value in places]
            self._tensors = [places[value] for value in taken if not value.is_size]
            self._sizes = [places[value] for value in taken if value.is_size]
            kept = {*lasting}
            self._lasting = [value in kept for value in taken if not value.is_size]
            self._plain: list[Tensor] = []  # lasting inputs that were found to be plain
            self._derived: Derived | None = None
            if derived:
                self._derived = Derived(before, [places[v] for v in before.inputs])

    def make(self, arguments: Sequence[Any]) -> None:
        """Make what is made once for many calls, before the first of them is timed."""
        if self._derived is not None:
            self._derived(arguments)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The outputs. Raises UnsettledError, and UnmetError where a value is another one."""
        tensors = [arguments[place] for place in self._tensors]
        sizes = [int(arguments[place]) for place in self._sizes]
        unseen = self._is_below and is_unseen() and self._are_plain(tensors)
        if self._derived is not None:
            made = self._derived(arguments)
            if made is None:
                raise UnsettledError(
                    "what is made of weights is written to again and again, or was made of tensors "
                    "of inference mode, which tell of no writes"
                )
            tensors += made
        if self._is_below:  # operators skip what autograd does around them, which takes a third
            with torch._C._AutoDispatchBelowAutograd():
                found, found_sizes = self.program(tensors, sizes, unseen)
        else:
            with torch.no_grad():
                found, found_sizes = self.program(tensors, sizes)
        return found if self._is_plain else self._ordered(found, found_sizes, arguments)

    def _are_plain(self, tensors: Sequence[Tensor]) -> bool:
        """Whether torch's dispatcher has nothing to see to; lasting inputs are asked once."""
        lasting = [*compress(tensors, self._lasting)]
        if len(lasting) != len(self._plain) or not all(map(is_, lasting, self._plain)):
            if not all(map(_is_plain, lasting)):
                return False
            self._plain = lasting
        return all(lasts or _is_plain(t) for t, lasts in zip(tensors, self._lasting, strict=True))

    def _ordered(
        self, found: Sequence[Tensor], found_sizes: Sequence[int], arguments: Sequence[Any]
    ) -> list[Any]:
        values: Iterator[Any] = iter(found)
        numbers: Iterator[Any] = iter(found_sizes)
        result: list[Any] = []
        for output in self._outputs:
            if isinstance(output, Value):
                result.append(next(numbers if output.is_size else values))
            else:
                result.append(arguments[output.place] if isinstance(output, Given) else output)
        return result


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one of a CPU whose memory holds what it reads as."""
    return (
        type(tensor) in PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested or tensor._is_zerotensor())
    )


def _shows_inputs(steps: Steps) -> bool:
    """Whether an output may share memory with an input or a constant.

    Then a write to one has to count as one to the other, which autograd's view tracking sees to.
    """
    shown = {*steps.inputs, *steps.constants}
    for step in steps.steps:
        if step.is_view and not shown.isdisjoint(step.taken):
            shown.update(value for value in step.results if value is not None)
    return not shown.isdisjoint(steps.outputs)


def _require(steps: Steps, required: Sequence[Tensor]) -> None:
    """Let the program end where its last outputs are other ones, as soon as they are made."""
    if not required:
        return
    values = steps.outputs[-len(required) :]
    del steps.outputs[-len(required) :]
    makers = {value: step for step in steps.steps for value in step.results if value is not None}
    waiting: dict[Step | None, list[Step]] = {}
    for value, tensor in zip(values, required, strict=True):
        wanted = Value()
        steps.constants[wanted] = tensor
        check = Step("require", [value, wanted], [], has_effect=True)
        waiting.setdefault(makers.get(value), []).append(check)
    found = waiting.pop(None, [])
    for step in steps.steps:
        found += [step, *waiting.get(step, ())]
    steps.steps = found
