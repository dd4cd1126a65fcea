"""Passes over convolutions that our own operators compute: over weights in panels, or of each
channel for itself. Their weights are plain tensors, which files can hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ...ops.convolution_panels import matrix_of
from ...ops.linear import supports
from ...ops.panels.formats import PLAIN_NAMES
from ...ops.panels.layout import OUTPUTS
from ...rewriting.measure import GAIN, first_win
from ..program import Argument, Some, Step, Value
from .convolution import changeable, follow_order, why_plain, zeros_before
from .convolution_times import Ways, geometry_of, ways_of
from .editor import Editor, known
from .post_ops import epilogue_of

PACK, PANELS = "oxytorch::pack_panels", "oxytorch::convolution_panels"
DEPTHWISE = "oxytorch::depthwise_convolution"
OWN = "program convolution of our own"
"""What times of these are called."""
MOST_LINES = 64
"""Lines of a kernel that `depthwise_convolution` takes."""
_SWEPT = {"relu": torch.relu_, "relu6": torch.nn.functional.relu6}
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
    why = why_plain(editor, step, own=True)
    if why:
        return why
    weight, groups = step.arguments[1].meta, int(step.arguments[8])
    if step.arguments[6] != "false" or weight.dim() == 3:
        return "it is transposed, or of one dimension"
    if weight.dtype not in PLAIN_NAMES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if _is_depthwise(step):
        lines = weight[0, 0, ..., 0].numel()
        return f"its kernels have more than {MOST_LINES} lines" if lines > MOST_LINES else ""
    if groups > 1 and weight.shape[0] // groups % OUTPUTS:
        return f"a group's outputs are no multiple of {OUTPUTS}"
    return ""


def _is_depthwise(step: Step) -> bool:
    weight = step.arguments[1].meta
    return bool(int(step.arguments[8]) == step.arguments[0].meta.shape[1] == weight.shape[0])


def _is_faster(editor: Editor, step: Step, steps: list[Step], beside_packed: bool) -> bool:
    ways = ways_of(editor, step, steps)
    result = step.results[0]
    taker = None if result is None else editor.only_taker(result)
    epilogue = epilogue_of(taker) if taker is not None else None
    after = _SWEPT.get(epilogue or "")
    key: Hashable = (OWN, epilogue if after is not None else None, ways.key)
    product = _product(step, ways, epilogue if after is not None else None)

    def then(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run if after is None else lambda: after(run())

    if first_win(key, [(then(ways.plain), product)], GAIN) is None:
        return False
    if not beside_packed or supports(step.arguments[1].meta.dtype) is not None:
        return True
    return first_win(("beside packed", key), [(then(ways.packed), product)], 1.0) is not None


def _product(step: Step, ways: Ways, epilogue: str | None) -> Callable[[], Tensor]:
    """Our operator with the numbers that other ways take."""
    padding, stride, dilation, groups = geometry_of(step)
    pads = [size for size in padding for _ in range(2)]
    packed: list[Tensor] = []

    def run() -> Tensor:
        values = ways.weight()
        if _is_depthwise(step):
            packed[:] = packed or [values[:, 0].movedim(0, -1).float().contiguous()]
            found = torch.ops.oxytorch.depthwise_convolution.default(
                ways.given(), packed[0], None, None, stride, pads, dilation, epilogue or "none"
            )
        else:
            format = PLAIN_NAMES[values.dtype]
            if not packed:
                matrix = matrix_of(values, groups)
                packed.append(torch.ops.oxytorch.pack_panels.default(matrix, format))
            found = torch.ops.oxytorch.convolution_panels.default(
                ways.given(),
                format,
                packed[0],
                [*values.shape[2:]],
                values.shape[0],
                None,
                None,
                stride,
                pads,
                dilation,
                groups,
                epilogue or "none",
            )
        return ways.returned(found)

    return run


def _own_steps(editor: Editor, step: Step) -> list[Step]:
    """The steps of a convolution by our operators, with the zeros of a step before it."""
    x, weight, bias, *_ = step.arguments
    padding, stride, dilation, groups = geometry_of(step)
    pairs = [(size, size) for size in padding]
    zeros = zeros_before(editor, step)
    if zeros is not None:
        x = zeros[0]
        pairs = [(a + c, b + d) for (a, b), (c, d) in zip(pairs, zeros[1], strict=True)]
    pads = [size for pair in pairs for size in pair]
    geometry: list[Argument] = [[*map(str, each)] for each in (stride, pads, dilation)]
    size = known(weight.meta.shape)
    assert size is not None
    if _is_depthwise(step):
        makes, packed = _positions_first(weight, size)
        arguments = [x, packed, bias, "none", *geometry, '"none"']
        return [*makes, Step(DEPTHWISE, arguments, step.results)]
    makes, matrix = _matrix(weight, size)
    format, packed = f'"{PLAIN_NAMES[weight.meta.dtype]}"', Value()
    makes.append(Step(PACK, [matrix, format, "false"], [packed]))
    kernel, channels = [*map(str, size[2:])], str(size[0])
    arguments = [x, format, packed, kernel, channels, bias, "none", *geometry]
    return [*makes, Step(PANELS, [*arguments, str(groups), '"none"'], step.results)]


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
