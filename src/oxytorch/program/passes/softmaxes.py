"""Pass over softmax: the scale and the mask of attention scores are part of its sweep."""

from __future__ import annotations

from typing import Any

from ..program import Some, Step, Value
from .editor import Editor, are_same, is_contiguous
from .norms import DTYPES

OURS = "oxytorch::softmax"
_SOFTMAX = {"aten::_softmax": "false", "aten::softmax.int": "none"}
"""Operators, and their last argument where they keep the dtype."""
_MOST_DIMS = 8


def softmaxes(editor: Editor) -> None:
    """Have softmax(x * scale + mask) over the last dimension computed in one sweep."""
    for step in editor.steps.steps:
        last = _SOFTMAX.get(step.target)
        if last is None:
            continue
        x, dim, kept = step.arguments
        if kept != last or not _is_of_rows(x, dim) or not is_contiguous(step.results[0]):
            editor.leave(step, "the kernel takes rows of float32, bfloat16 or float16")
            continue
        scores, mask = _masked(editor, x)
        source, scale = _scaled(editor, scores)
        if mask is None and source is x:
            editor.leave(step, "no scale and no mask is before it")
            continue
        given = [source, repr(scale), "none" if mask is None else Some(mask)]
        editor.replace(step, Step(OURS, given, step.results))
    editor.apply()


def _is_of_rows(x: Any, dim: str) -> bool:
    meta = x.meta if isinstance(x, Value) else None
    if meta is None or meta.dtype not in DTYPES or not 0 < meta.dim() <= _MOST_DIMS:
        return False
    return dim in ("-1", str(meta.dim() - 1))


def _masked(editor: Editor, x: Value) -> tuple[Value, Value | None]:
    """What a mask is added to, and the mask."""
    total = editor.made_by(x, "add")
    if total is None or total.arguments[2] != "1.0" or editor.only_taker(x) is None:
        return x, None
    first, second, _ = total.arguments
    for scores, mask in ((first, second), (second, first)):
        is_mask = isinstance(mask, Value) and mask.meta is not None and mask.meta.dim() > 0
        if is_mask and mask is not scores and _is_like(scores, x) and mask.meta.dtype in DTYPES:
            return scores, mask
    return x, None


def _scaled(editor: Editor, x: Value) -> tuple[Value, float]:
    """What is multiplied with a number, or divided by one, and that number."""
    product = editor.made_by(x, "aten::mul.Tensor", "aten::div.Tensor")
    if product is None or editor.only_taker(x) is None:
        return x, 1.0
    first, second = product.arguments
    pairs = [(first, second)]
    if product.target == "aten::mul.Tensor":
        pairs.append((second, first))
    for source, factor in pairs:
        number = editor.number(factor)
        if number is None or not _is_like(source, x):
            continue
        scale = float(number) if product.target == "aten::mul.Tensor" else _inverse(number)
        if scale:
            return source, scale
    return x, 1.0


def _inverse(number: float) -> float:
    return 1 / number if number else 0.0


def _is_like(value: Any, other: Value) -> bool:
    """Whether a tensor has the shape and dtype of another one."""
    meta, own = (each.meta if isinstance(each, Value) else None for each in (value, other))
    return (
        meta is not None
        and own is not None
        and meta.dtype == own.dtype
        and are_same(meta.shape, own.shape)
    )
