"""What is computed from the result of a linear layer or a convolution in the same sweep."""

from __future__ import annotations

from dataclasses import replace

from ...ops.post_op import PostOp
from ..allowed import IN_PLACE
from ..program import Some, Step, Value
from .editor import Editor, are_same

UNARY = {
    "aten::sigmoid": "sigmoid",
    "aten::tanh": "tanh",
    "aten::silu": "swish",
    "aten::hardswish": "hardswish",
}
"""Activations without numbers that oneDNN computes as torch does, and its names for them. It has
more, but turns NaN to 0 in some of them."""
GELU = "aten::gelu"


def activation(step: Step | None) -> tuple[str, str] | None:
    """oneDNN's name and algorithm of an activation, None if it has none that is torch's."""
    if step is None:
        return None
    if step.target == GELU:
        return "gelu", str(step.arguments[1]).strip('"')
    name = UNARY.get(step.target)
    return None if name is None else (name, "")


def epilogue_of(step: Step) -> str | None:
    """The epilogue of our operators that computes an activation; None if there is none."""
    own = {"aten::relu": "relu", "aten::relu6": "relu6"}  # which keep NaN, as not all of oneDNN's
    found = activation(step)
    return own.get(step.target) if found is None else PostOp.of_onednn(*found).epilogue


def is_activation(step: Step) -> bool:
    """Whether a step computes each element of its result from one of its first argument alone."""
    return step.target in _IN_PLACE


def other_of_sum(step: Step | None, value: Value) -> Value | None:
    """What a step adds to a value, if it is of the same shape and dtype."""
    if step is None or step.target != "add" or step.arguments[2] != "1.0":
        return None
    first, second, _ = step.arguments
    other = second if first is value else first
    if other is value or not isinstance(other, Value) or other.meta is None or value.meta is None:
        return None
    alike = are_same(other.meta.shape, value.meta.shape) and other.meta.dtype == value.meta.dtype
    return other if alike else None


def in_place(editor: Editor) -> None:
    """Compute an activation in the memory of the layer's result before it, which nobody else
    takes."""
    for step in editor.steps.steps:
        if step.target in _IN_PLACE:
            x = step.arguments[0]
            before = editor.maker.get(x)
            is_layer = before is not None and before.target.startswith(_LAYERS)
            if is_layer and editor.only_taker(x) is step and _keeps_dtype(x, step.results[0]):
                editor.replace(step, replace(step, target=f"{step.target}_"))
    editor.apply()


def _keeps_dtype(x: Value, result: Value | None) -> bool:
    metas = [None if value is None else value.meta for value in (x, result)]
    return all(m is not None and m.is_floating_point() for m in metas) and (
        metas[0].dtype == metas[1].dtype  # type: ignore[union-attr]
    )


_IN_PLACE = frozenset(f"aten::{name.removesuffix('_')}" for name in IN_PLACE)
"""Activations of which torch has a form that writes to what it takes."""
_LAYERS = (
    "aten::linear", "aten::convolution", "mkldnn::", "oxytorch::linear_panels",
    "oxytorch::convolution_panels", "oxytorch::depthwise_convolution",
)  # fmt: skip
"""Steps whose results are new tensors."""


def words(name: str, algorithm: str) -> list[object]:
    """The arguments of torch's operators for oneDNN that tell the activation."""
    return [f'"{name}"', [], Some(f'"{algorithm}"')]
