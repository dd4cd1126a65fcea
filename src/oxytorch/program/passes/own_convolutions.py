"""Passes over convolutions that our own operators compute: over weights in panels, or of each
channel separately. Their weights are plain tensors, which files can hold."""

from __future__ import annotations

import torch

from ...ops.linear import supports
from ...ops.panels.formats import PLAIN_NAMES
from ..program import Argument, Some, Step, Value
from .convolution import changeable, follow_order, padded_input, why_plain, zeros_before
from .convolution_times import convolution_of, is_faster, layer_of
from .editor import Editor, known
from .post_ops import epilogue_of, other_of_sum

PACK, PANELS = "oxytorch::pack_panels", "oxytorch::convolution_panels"
DEPTHWISE = "oxytorch::depthwise_convolution"
_SWEPT = ("relu", "relu6")
"""Activations that our operators compute in their sweep, and oneDNN's do not as torch does."""


def fastest_own(editor: Editor) -> None:
    """Have our operators compute convolutions where they are faster than torch's and oneDNN's."""
    _to_own(editor, beside_packed=True)


def own(editor: Editor) -> None:
    """The same where they are faster than torch's."""
    _to_own(editor, beside_packed=False)


def _to_own(editor: Editor, beside_packed: bool) -> None:
    steps = changeable(editor, lambda step: _why_not(editor, step))
    won = False
    for step in steps:
        if not _is_faster(editor, step, steps, beside_packed):
            editor.leave(step, "an operator of ours was timed and is not faster")
            continue
        editor.replace(step, *_own_steps(editor, step))
        won = True
    editor.apply()
    if won:
        follow_order(editor)


def _why_not(editor: Editor, step: Step) -> str:
    """Why our operators cannot compute a convolution; empty if they can."""
    return why_plain(editor, step, any_size=True, own=True) or convolution_of(step).why_not_own()


def _is_faster(editor: Editor, step: Step, steps: list[Step], beside_packed: bool) -> bool:
    layer, swept = layer_of(editor, step, steps), _is_swept(editor, step, steps)
    padded = zeros_before(editor, step) is not None
    if not is_faster(layer, "own", "plain", swept, padded):
        return False
    can_be_packed = supports(layer.dtype) is None and not why_plain(editor, step)
    if not beside_packed or not can_be_packed:
        return True
    return is_faster(layer, "own", "packed", swept, padded, gain=1.0)


def _is_swept(editor: Editor, step: Step, steps: list[Step]) -> bool:
    """Whether only our operators compute the activation that follows a convolution in its sweep:
    at once, or behind a sum, which oneDNN's compute in theirs too. Of a sum of two convolutions the
    first one computes it."""
    (result,) = step.results
    taker = None if result is None else editor.only_taker(result)
    other = None if result is None else other_of_sum(taker, result)
    if other is not None and taker is not None and taker.results[0] is not None:
        if editor.maker.get(other) in steps[: steps.index(step)]:
            return False
        taker = editor.only_taker(taker.results[0])
    return taker is not None and epilogue_of(taker) in (_SWEPT if other is None else _SWEPT[:1])


def _own_steps(editor: Editor, step: Step) -> list[Step]:
    """The steps of a convolution by our operators, with the zeros of a step before it."""
    _, weight, bias, *_ = step.arguments
    layer = convolution_of(step)
    x, pads = padded_input(editor, step)
    geometry: list[Argument] = [[*map(str, layer.stride)], pads, [*map(str, layer.dilation)]]
    size = known(weight.meta.shape)
    assert size is not None
    if layer.is_depthwise:
        makes, packed = _positions_first(weight, size)
        arguments = [x, packed, bias, "none", *geometry, '"none"']
        return [*makes, Step(DEPTHWISE, arguments, step.results)]
    makes, matrix = _matrix(weight, size)
    format, packed = f'"{PLAIN_NAMES[weight.meta.dtype]}"', Value()
    makes.append(Step(PACK, [matrix, format, "false"], [packed]))
    kernel, channels = [*map(str, size[2:])], str(size[0])
    arguments = [x, format, packed, kernel, channels, bias, "none", *geometry]
    return [*makes, Step(PANELS, [*arguments, str(layer.groups), '"none"'], step.results)]


def _matrix(weight: Value, size: tuple[int, ...]) -> tuple[list[Step], Value]:
    """`matrix_of` as steps, of a weight whose groups have whole panels or that has one group."""
    turned, even, matrix = Value(), Value(), Value()
    order = ["0", *map(str, range(2, len(size))), "1"]
    steps = [Step("aten::permute", [weight, order], [turned], is_view=True)]
    if weight.meta is not None and weight.meta.dtype == torch.bfloat16 and size[1] % 2:
        steps.append(Step("aten::pad", [turned, ["0", "1"], '"constant"', Some("0.0")], [even]))
        turned = even
    steps.append(Step("aten::reshape", [turned, [str(size[0]), "-1"]], [matrix], is_view=True))
    return steps, matrix


def _positions_first(weight: Value, size: tuple[int, ...]) -> tuple[list[Step], Value]:
    """A weight [channels, 1, *kernel] as float32 [*kernel, channels]."""
    turned, wide, lies = Value(), Value(), Value()
    order = ["1", *map(str, range(2, len(size))), "0"]
    shape = [*map(str, size[2:]), str(size[0])]
    copy = [turned, Some("=float32"), *["none"] * 3, "false", Some("=contiguous_format")]
    return [
        Step("aten::permute", [weight, order], [turned], is_view=True),
        Step("aten::_to_copy", copy, [wide]),
        Step("aten::reshape", [wide, shape], [lies], is_view=True),
    ], lies
