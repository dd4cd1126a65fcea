"""Recorded steps that write to a tensor nobody else takes, as steps that make a new one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .calls import OperatorCall, Recording, TensorRef, values_in

_aten = torch.ops.aten

NAMES = (
    "add", "clamp", "clamp_max", "clamp_min", "div", "elu", "exp", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "masked_fill", "mul", "neg", "relu", "rsqrt", "sigmoid", "silu",
    "sqrt", "sub", "tanh",
)  # fmt: skip
"""Operators whose result is that of their in-place form, where all tensors have one dtype."""

FUNCTIONAL = {
    getattr(getattr(_aten, f"{name}_"), overload): getattr(getattr(_aten, name), overload)
    for name in NAMES
    for overload in getattr(_aten, f"{name}_").overloads()
    if overload in getattr(_aten, name).overloads()
}
"""In-place operators, and those that return a new tensor."""


def without_writes(recording: Recording) -> Recording | None:
    """The recording where each write makes a new tensor; None where some write does more.

    A write to memory that other values show, which are taken later, changes these as well.
    """
    last = {value: len(recording.steps) for value in recording.outputs}
    for place, step in reversed([*enumerate(recording.steps)]):
        for value in values_in(step.arguments):
            last.setdefault(value, place)
    shown: dict[int, list[TensorRef]] = {}
    for value, form in recording.forms.items():
        shown.setdefault(form.memory, []).append(value)
    steps = []
    for place, step in enumerate(recording.steps):
        if step.operator._schema.is_mutable:
            found = _functional(recording, step)
            written = step.arguments[0]
            others = shown.get(recording.forms[written].memory, ()) if found else ()
            if found is None or any(
                last.get(other, -1) > place and other.number < step.results[0].number
                for other in others
            ):
                return None
            step = found
        steps.append(step)
    return replace(recording, steps=steps)


def _functional(recording: Recording, step: OperatorCall) -> OperatorCall | None:
    operator = FUNCTIONAL.get(step.operator)
    forms = [recording.forms.get(value) for value in values_in(step.arguments)]
    if operator is None or forms[0] is None or not forms[0].is_dense:
        return None
    dtypes: set[Any] = {None if form is None else form.dtype for form in forms}
    dtypes -= {torch.bool} if operator._schema.name == "aten::masked_fill" else set()
    is_alone = len(dtypes) == 1 and forms[0].dtype.is_floating_point
    shapes = [form.shape for form in forms if form is not None]
    if not is_alone or any(shape != shapes[0] for shape in shapes):
        return None
    return replace(step, operator=operator)
