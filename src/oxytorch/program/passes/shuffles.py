"""Pass over channel shuffles, which models write as views and a copy."""

from __future__ import annotations

from torch import Tensor

from ..program import Step, Value
from .editor import VIEWS, Editor, are_same, is_contiguous
from .norms import DTYPES

SHUFFLE = "aten::native_channel_shuffle"
_MOVES = ("aten::transpose.int", "aten::permute")
_COPIES = ("aten::clone", "aten::contiguous")
_DIMS = (3, 4)
"""Of what torch's operator takes in every order in memory."""


def shuffles(editor: Editor) -> None:
    """Have one operator exchange the groups of channels with the channels of each group.

    That one keeps channels-last order, in which convolutions pass tensors to each other; the copy
    between two views does not.
    """
    for step in editor.steps.steps:
        found = _shuffled(editor, step) if step.target in VIEWS else None
        if found is not None:
            x, groups = found
            editor.replace(step, Step(SHUFFLE, [x, str(groups)], step.results))
    editor.apply()


def _shuffled(editor: Editor, step: Step) -> tuple[Value, int] | None:
    """What is shuffled, and in how many groups; None where a view is not the last step of that."""
    copy = editor.made_by(step.arguments[0], *_COPIES)
    moved = editor.made_by(step.arguments[0] if copy is None else copy.arguments[0], *_MOVES)
    split = None if moved is None else editor.made_by(moved.arguments[0], *VIEWS)
    if moved is None or split is None:
        return None
    x, result = split.arguments[0], step.results[0]
    metas = [_meta(each) for each in (x, split.results[0], moved.results[0], result)]
    given, parts, exchanged, found = metas
    if given is None or parts is None or exchanged is None or found is None:
        return None
    is_known = given.dtype in DTYPES and given.dim() in _DIMS and parts.dim() == given.dim() + 1
    if not is_known or not is_contiguous(x) or not is_contiguous(result):
        return None
    is_shuffle = (
        are_same(parts.shape[3:], given.shape[2:])
        and are_same(parts.shape[:1], given.shape[:1])
        and are_same(_exchanged(parts.shape), exchanged.shape)
        and are_same(_exchanged(parts.stride()), exchanged.stride())
        and are_same(given.shape, found.shape)
    )
    groups = parts.shape[1]
    return (x, groups) if is_shuffle and type(groups) is int and groups > 1 else None


def _meta(value: Value | None) -> Tensor | None:
    return value.meta if isinstance(value, Value) else None


def _exchanged(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes[0], sizes[2], sizes[1], *sizes[3:]
