"""Passes over linear layers whose weights lie in panels: plain tensors, which files can hold, and
which are faster than oneDNN's packed ones for some sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.linear import supports
from ...ops.panels.epilogues import ADDED
from ...ops.panels.formats import PLAIN_NAMES
from ...rewriting.measure import NO_LOSS
from ..program import Some, Step, Value
from .editor import Editor, is_contiguous, known
from .linear import (
    LINEAR,
    PANELS,
    fits_panels,
    is_faster,
    packed_call,
    panels_call,
    plain_call,
)
from .post_ops import epilogue_of, other_of_sum

PACK = "oxytorch::pack_panels"
"""What times of both are called."""


def to_panels(editor: Editor) -> None:
    """Have linear layers whose weights last take them in panels, where that is faster."""
    _to_panels(editor, pays)


def fastest_in_panels(editor: Editor) -> None:
    """The same where that is faster than a weight in oneDNN's order, too."""
    _to_panels(editor, lambda x, weight: pays(x, weight) and beats_packed(x, weight))


def _to_panels(editor: Editor, pays: Callable[[Any, Any], bool]) -> None:
    packed_of: dict[Value, Value] = {}
    for step in editor.steps.steps:
        if step.target != LINEAR:
            continue
        x, weight, bias = step.arguments
        if not is_contiguous(step.results[0]) or not _can_be_panels(editor, x, weight, bias):
            continue
        if not pays(x.meta, weight.meta):
            continue
        format = f'"{PLAIN_NAMES[weight.meta.dtype]}"'
        makes: list[Step] = []
        if weight not in packed_of:
            packed_of[weight] = Value()
            makes = [Step(PACK, [weight, format, "false"], [packed_of[weight]])]
        width = str(weight.meta.shape[0])
        nothing = ["none"] * 3
        arguments = [x, format, packed_of[weight], *nothing, width, bias, "none"]
        call = Step(PANELS, [*arguments, '"none"', '"none"'], step.results)
        editor.replace(step, *makes, call)
    editor.apply()


def _can_be_panels(editor: Editor, x: Any, weight: Any, bias: Any) -> bool:
    meta, inner = weight.meta, x.meta
    if weight not in editor.lasting or meta is None or inner is None:
        return False
    if meta.dim() != 2 or known(meta.shape) is None or inner.dtype != meta.dtype or not inner.dim():
        return False
    if isinstance(bias, Some) and (bias.item.meta is None or bias.item.meta.dtype != meta.dtype):
        return False
    return fits_panels(meta)


def pays(x: Any, weight: Any) -> bool:
    """Whether panels are faster than torch's own layer."""
    return is_faster(x, weight, panels_call, plain_call, gain=1.0)


def beats_packed(x: Any, weight: Any) -> bool:
    """Whether panels are no slower than a weight in oneDNN's order, where oneDNN has its products.
    In whole models panels gain a twentieth more than by such times."""
    has_none = supports(weight.dtype) is not None
    return has_none or is_faster(x, weight, panels_call, packed_call, gain=NO_LOSS)


SWEEPS = {
    PANELS: (8, 9),
    "oxytorch::convolution_panels": (6, 11),
    "oxytorch::depthwise_convolution": (3, 7),
    "oxytorch::quantized_linear": (8, 11),
    "oxytorch::quantized_convolution": (9, 16),
}
"""Operators that compute what follows in their sweep: places of what they add, and of the epilogue
that says so."""
_OF_ROWS = (PANELS, "oxytorch::quantized_linear")


def fuse(editor: Editor) -> None:
    """Compute activations and sums in the sweep of the layer before them."""
    before = None
    while before != len(editor.steps.steps):  # a sum, and then what follows that
        before = len(editor.steps.steps)
        for step in editor.steps.steps:
            if step.target in SWEEPS and not editor.is_changed(step):
                _fuse(editor, step)
        editor.apply()


def _fuse(editor: Editor, step: Step) -> None:
    (result,) = step.results
    taker = None if result is None else editor.only_taker(result)
    if taker is None or result is None or editor.is_changed(taker):
        return
    if step.target in _OF_ROWS and not is_contiguous(taker.results[0]):
        return  # convolutions have seen to the order
    arguments = [*step.arguments]
    place, last = SWEEPS[step.target]
    epilogue, other = epilogue_of(taker), other_of_sum(taker, result)
    if arguments[last] == '"add"' and epilogue == "relu":
        arguments[last] = '"add_relu"'
    elif other is not None and (summed := _summed(arguments[last])) in ADDED:
        arguments[place], arguments[last] = Some(other), f'"{summed}"'
    elif arguments[last] != '"none"':
        return
    elif epilogue is not None:
        arguments[last] = f'"{epilogue}"'
    else:
        return
    editor.replace(step)
    editor.replace(taker, Step(step.target, arguments, taker.results))


def _summed(epilogue: str) -> str:
    """The epilogue that adds another tensor behind one; there is not one for all."""
    name = epilogue.strip('"')
    return "add" if name == "none" else f"{name}_add"
