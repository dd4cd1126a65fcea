"""Pass that writes operators as `torch.export` leaves them in the way that the others know."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.convolution import needed_dilation
from ..program import Some, Step, Value
from .editor import Editor, is_contiguous, known
from .norms import DTYPES

CONVOLUTIONS = {"aten::conv1d": 1, "aten::conv2d": 2, "aten::conv3d": 3}
TRANSPOSED = {
    "aten::conv_transpose1d": 1,
    "aten::conv_transpose2d.input": 2,
    "aten::conv_transpose3d.input": 3,
}


def spellings(editor: Editor) -> None:
    """Write convolutions of so many dimensions, and normalizations, in one way."""
    for step in editor.steps.steps:
        dims = CONVOLUTIONS.get(step.target)
        made = None
        if dims is not None:
            made = _convolution(step, dims)
        elif step.target == "aten::convolution":
            made = _in_full(step)
        elif step.target.removesuffix(".padding") in CONVOLUTIONS:
            makes = _named_padding(step, CONVOLUTIONS[step.target.removesuffix(".padding")])
            if makes:
                editor.replace(step, *makes)
        elif step.target in TRANSPOSED:
            made = _transposed(step, TRANSPOSED[step.target])
        elif step.target == "aten::layer_norm":
            made = Step("aten::native_layer_norm", step.arguments[:5], [*step.results, None, None])
        elif step.target in ("aten::batch_norm", "aten::native_batch_norm"):
            made = _batch_norm(step)
        elif step.target == "aten::rms_norm":
            made = _rms_norm(step)
        if made is not None:
            editor.replace(step, made)
    editor.apply()


def _in_full(step: Step) -> Step | None:
    """A convolution with a number for each dimension, where one stands for all, and without
    dilations that change nothing."""
    x, weight, bias, stride, padding, dilation, transposed, more, groups = step.arguments
    if not isinstance(x, Value) or x.meta is None:
        return None
    dims = x.meta.dim() - 2
    lists = [each * dims if len(each) == 1 else each for each in (stride, padding, dilation, more)]
    lists[2] = _needed_dilation(lists[2], weight)
    if lists == [stride, padding, dilation, more]:
        return None
    arguments = [x, weight, bias, *lists[:3], transposed, lists[3], groups]
    return step.with_arguments(arguments)


def _convolution(step: Step, dims: int) -> Step | None:
    x, weight, bias, *lists, groups = step.arguments
    stride, padding, dilation = (each * dims if len(each) == 1 else each for each in lists)
    rest = [stride, padding, dilation, "false", ["0"] * dims, groups]
    return _of_batch(step, dims, [x, weight, bias, *rest])


def _named_padding(step: Step, dims: int) -> list[Step]:
    """A convolution whose padding is "same" or "valid", by numbers; with the zeros added before it
    where they are not as many on both sides."""
    x, weight, bias, stride, named, dilation, groups = step.arguments
    size = known(weight.meta.shape) if weight.meta is not None else None
    if size is None or x.meta is None or named not in ('"same"', '"valid"'):
        return []
    dilation = dilation * dims if len(dilation) == 1 else dilation
    reach = [int(d) * (k - 1) for d, k in zip(dilation, size[2:], strict=True)]
    totals = reach if named == '"same"' else [0] * dims
    makes: list[Step] = []
    if any(total % 2 for total in totals):
        sizes = [n for total in totals[::-1] for n in (total // 2, total - total // 2)]
        padded = Value(meta=torch.nn.functional.pad(x.meta, sizes))
        arguments = [x, [*map(str, sizes)], '"constant"', Some("0.0")]
        makes.append(Step("aten::pad", arguments, [padded]))
        x, totals = padded, [0] * dims
    padding = [str(total // 2) for total in totals]
    arguments = [x, weight, bias, stride, padding, dilation, groups]
    made = _convolution(step.with_arguments(arguments), dims)
    return [] if made is None else [*makes, made]


def _transposed(step: Step, dims: int) -> Step | None:
    x, weight, bias, *lists = step.arguments
    groups = lists.pop(3)
    stride, padding, more, dilation = (each * dims if len(each) == 1 else each for each in lists)
    return _of_batch(step, dims, [x, weight, bias, stride, padding, dilation, "true", more, groups])


def _needed_dilation(dilation: list[Any], weight: Any) -> list[Any]:
    size = None if weight.meta is None else known(weight.meta.shape)
    if size is None:
        return dilation
    return needed_dilation(dilation, size[2:], "1")


def _of_batch(step: Step, dims: int, arguments: list[Any]) -> Step | None:
    """A convolution of a batch, which is what the one operator for all dimensions takes."""
    x, weight = arguments[:2]
    arguments[5] = _needed_dilation(arguments[5], weight)
    if not isinstance(x, Value) or x.meta is None or x.meta.dim() != dims + 2:
        return None
    return Step("aten::convolution", arguments, step.results)


def _batch_norm(step: Step) -> Step | None:
    x, weight, bias, mean, variance, training, momentum, eps, *_ = step.arguments
    if training != "false" or not isinstance(mean, Some) or not isinstance(variance, Some):
        return None
    target = "aten::_native_batch_norm_legit_no_training"
    arguments = [x, weight, bias, mean.item, variance.item, momentum, eps]
    first, *others = step.results
    if any(others):
        return None  # which have other shapes there
    return Step(target, arguments, [first, None, None])


def _rms_norm(step: Step) -> Step | None:
    x, shape, weight, eps = step.arguments
    if eps == "none" and x.meta is not None and x.meta.dtype in DTYPES:
        eps = Some(repr(torch.finfo(torch.float32).eps))  # as torch has it for narrower dtypes, too
    is_ours = len(shape) == 1 and isinstance(eps, Some) and is_contiguous(step.results[0])
    if not is_ours or not _is_of_dtype(weight, x.meta):
        return None
    return Step("oxytorch::rms_norm", [x, weight, eps.item], step.results)


def _is_of_dtype(weight: Any, meta: Any) -> bool:
    if meta is None or not isinstance(weight, Some):
        return meta is not None
    return weight.item.meta is not None and weight.item.meta.dtype == meta.dtype
