"""The steps of a program while passes change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import Argument, Some, Step, Steps, Value

VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
"""Steps that give a tensor another shape."""


@dataclass(frozen=True)
class Note:
    """What a pass did with a step, or why it left it.

    by: the pass.
    made: the targets of the steps in its place; none: others compute its results.
    why: the reason why it stays, empty if it does not.
    """

    by: str
    step: Step
    made: tuple[str, ...] = ()
    why: str = ""


class Editor:
    """Who makes and who takes each value of a program, and a list of changes to its steps.

    lasting: the values that are the same at each call until the user writes to them: constants,
    parameters, buffers, and what is computed from these alone.
    known: the tensors of those that are never written to.
    notes: what was done and left so far; `by` is the pass that is at work.
    """

    def __init__(
        self,
        steps: Steps,
        lasting: Iterable[Value],
        known: Mapping[Value, Tensor] | None = None,
    ) -> None:
        self.steps = steps
        self.lasting = {*lasting}
        self.known = known or {}
        self.notes: list[Note] = []
        self.by = ""
        self._changes: dict[Step, list[Step]] = {}
        self._redirected: dict[Value, Value] = {}
        self._look()

    def _look(self) -> None:
        self.maker: dict[Value, Step] = {}
        self.takers: dict[Value, list[Step]] = {}
        self.lasting |= self.steps.constants.keys()
        for step in self.steps.steps:
            for value in dict.fromkeys(step.taken):
                self.takers.setdefault(value, []).append(step)
            self.maker.update({value: step for value in step.results if value is not None})
            if self.lasts(step):
                self.lasting.update(value for value in step.results if value is not None)
        self.outputs = {*self.steps.outputs}

    def lasts(self, step: Step) -> bool:
        """Whether a step computes the same at each call."""
        is_lasting = bool(step.taken) and self.lasting.issuperset(step.taken)
        return is_lasting and not step.has_effect and not any(v and v.is_size for v in step.results)

    def only_taker(self, value: Value) -> Step | None:
        """The step that takes a value, if it is the only one and the value is no output."""
        takers = self.takers.get(value, [])
        return takers[0] if len(takers) == 1 and value not in self.outputs else None

    def made_by(self, value: Argument, *targets: str) -> Step | None:
        """The step that makes a value, if it is of one of these kinds."""
        step = self.maker.get(value) if isinstance(value, Value) else None
        return step if step is not None and step.target in targets else None

    def tensor(self, value: Argument) -> Tensor | None:
        """A constant, or a copy of one; None for other values."""
        copied = self.made_by(value, "aten::clone")
        source = value if copied is None else copied.arguments[0]
        if not isinstance(source, Value):
            return None
        return self.steps.constants.get(source, self.known.get(source))

    def number(self, value: Argument) -> int | float | None:
        """A constant number, or a copy of one; None for other values."""
        tensor = self.tensor(value)
        if tensor is None or tensor.dim() or tensor.dtype == torch.bool or tensor.is_complex():
            return None
        found: int | float = tensor.item()
        return found

    def replace(self, step: Step, *others: Step) -> None:
        """Put steps in the place of one; they make the results that others take."""
        self._changes[step] = [*others]
        self.notes.append(Note(self.by, step, tuple(other.target for other in others)))

    def leave(self, step: Step, why: str) -> None:
        """Say why the pass at work, which is for steps like this one, changes nothing."""
        self.notes.append(Note(self.by, step, why=why))

    def redirect(self, value: Value, other: Value) -> None:
        """Have `other`, which is made earlier, taken in place of a value."""
        self._redirected[value] = other

    def is_changed(self, *steps: Step) -> bool:
        """Whether a step was replaced since the last `apply`."""
        return any(step in self._changes for step in steps)

    def apply(self) -> None:
        """Change the steps as was asked for, and drop those whose results nobody takes now."""
        found: list[Step] = []
        for step in self.steps.steps:
            found += self._changes.get(step, [step])
        steps = self.steps
        steps.steps = [self._with_others(step) for step in found] if self._redirected else found
        steps.outputs = [self._final(value) for value in steps.outputs]
        self._changes, self._redirected = {}, {}
        steps.drop_unused()
        self._look()

    def _with_others(self, step: Step) -> Step:
        if self._redirected.keys().isdisjoint(step.taken):
            return step
        return step.with_arguments([self._replaced(each) for each in step.arguments])

    def _replaced(self, argument: Argument) -> Argument:
        if isinstance(argument, Value):
            return self._final(argument)
        if isinstance(argument, Some):
            return Some(self._replaced(argument.item))
        if isinstance(argument, list | tuple):
            return [self._replaced(item) for item in argument]
        return argument

    def _final(self, value: Value) -> Value:
        while value in self._redirected:
            value = self._redirected[value]
        return value


Pass = Callable[[Editor], None]


def is_same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal."""
    return bool(_formula(a) == _formula(b))


def _formula(size: Any) -> Any:
    """A size as a number, or as a formula of symbols, which may have become a number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes, or strides, are known to be equal."""
    return len(a) == len(b) and all(map(is_same, a, b))


def is_contiguous(value: Value | None) -> bool:
    """Whether a tensor is known to lie in torch's order, as results of our kernels do."""
    return value is not None and value.meta is not None and value.meta.is_contiguous()


def known(shape: Sequence[Any]) -> tuple[int, ...] | None:
    """A shape whose sizes are all known, else None."""
    return tuple(shape) if all(type(size) is int for size in shape) else None


def takes_any_order(step: Step) -> bool:
    """Whether a step does not depend on how its input lies in memory."""
    is_operator = "::" in step.target
    return not step.target.startswith(_OF_ORDER) and (
        not is_operator or step.target.startswith(_KNOWN)
    )


_OF_ORDER = ("aten::as_strided", "aten::view.dtype", "aten::view_as_", "aten::set_")
_KNOWN = ("aten::", "oxytorch::", "mkldnn::", "script::", "quantized_decomposed::")
"""Operators of others may want their inputs as they were when the graph was captured. Who writes
steps of TorchScript has looked at those that no pass knows."""
