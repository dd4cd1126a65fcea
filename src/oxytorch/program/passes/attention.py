"""Pass over scaled dot-product attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.attention import MOST_DIM, is_fast
from ...rewriting.measure import first_win, numbers
from ..program import Argument, Some, Step, Value
from .editor import Editor, known

TORCHS, OURS = "aten::_scaled_dot_product_flash_attention_for_cpu", "oxytorch::attention"
WHOLE = "aten::scaled_dot_product_attention"
"""As `torch.export` leaves it."""
DTYPES = (torch.float32, torch.bfloat16)
_ELSEWHERE = (
    "the kernel takes known sizes in float32 or bfloat16 without dropout, with the heads of a row "
    "side by side"
)


def attention(editor: Editor) -> None:
    """Have attention of known sizes computed by the kernel of this package, where it is faster."""
    for step in editor.steps.steps:
        if step.target not in (TORCHS, WHOLE):
            continue
        if not is_fast() or any(step.results[1:]):
            why = "a gradient is asked for" if is_fast() else "the kernel needs vectors of 512 bits"
            editor.leave(step, why)
            continue
        query, key, value, *rest = step.arguments
        if step.target == TORCHS:
            dropout, is_causal, mask, scale = rest
        else:
            mask, dropout, is_causal, scale, _ = rest
            if not _lies_by_rows(_meta(step.results[0])):  # whichever kernel torch would take
                editor.leave(step, _ELSEWHERE)
                continue
        metas = [_meta(each) for each in (query, key, value)]
        if dropout != "0.0" or not all(map(_is_known, metas)) or not _lies_by_rows(metas[0]):
            editor.leave(step, _ELSEWHERE)
            continue
        if mask != "none" and not _is_known(_meta(mask.item)):
            editor.leave(step, "the size of its mask is not known")
            continue
        if not _pays(metas, None if mask == "none" else _meta(mask.item), is_causal == "true"):
            editor.leave(step, "the kernel was timed and is not faster than torch's")
        else:
            arguments = [query, key, value, _own(editor, mask), scale, is_causal]
            editor.replace(step, Step(OURS, arguments, step.results[:1]))
    editor.apply()


def _meta(value: Any) -> Any:
    return value.meta if isinstance(value, Value) else None


def _is_known(meta: Any) -> bool:
    if meta is None or meta.dim() != 4 or meta.dtype not in (*DTYPES, torch.bool):
        return False
    shape = known(meta.shape)
    return shape is not None and 0 not in shape and shape[-1] <= max(MOST_DIM, meta.shape[-2])


def _lies_by_rows(query: Any) -> bool:
    """Whether torch's result, which lies in memory as the query does, lies there as ours: as
    [batch, length, heads, dim]."""
    if not _is_known(query):
        return False
    _, heads, length, dim = query.shape
    ours = (heads * length * dim, dim, heads * dim, 1)
    there = torch.empty_strided(tuple(query.shape), query.stride(), device="meta")
    found = zip(query.shape, torch.empty_like(there).stride(), ours, strict=True)
    return all(size == 1 or stride == own for size, stride, own in found)


def _own(editor: Editor, mask: Argument) -> Argument:
    """A mask of numbers that was made of one of truth values, as that one."""
    made = editor.made_by(mask.item, "aten::where.self") if isinstance(mask, Some) else None
    if made is None:
        return mask
    chosen, yes, no = made.arguments
    values = [editor.number(each) for each in (yes, no)]
    return Some(chosen) if values == [0.0, -torch.inf] else mask


def _pays(metas: list[Tensor], mask: Tensor | None, is_causal: bool) -> bool:
    query, key, _ = metas
    if query.shape[-1] > MOST_DIM or query.shape[1] % key.shape[1]:
        return False
    form = tuple((tuple(t.shape), t.stride(), t.dtype) for t in metas)
    masked = None if mask is None else (tuple(mask.shape), mask.dtype)
    ours = torch.ops.oxytorch.attention.default

    @cache
    def given() -> tuple[list[Tensor], Tensor | None]:
        own_mask = None if mask is None else torch.zeros(tuple(mask.shape), dtype=mask.dtype)
        return [_alike(meta) for meta in metas], own_mask

    def run_plain() -> Tensor:
        (query, key, value), own_mask = given()
        return functional.scaled_dot_product_attention(
            query, key, value, own_mask, is_causal=is_causal
        )

    def run_ours() -> Tensor:
        tensors, own_mask = given()
        found: Tensor = ours(*tensors, own_mask, None, is_causal)
        return found

    what = ("program attention", form, masked, is_causal)
    return first_win(what, [(run_plain, run_ours)]) is not None


def _alike(meta: Tensor) -> Tensor:
    """A tensor of the same shape and strides, also where places share memory."""
    shape, strides = tuple(meta.shape), meta.stride()
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return numbers(count).to(meta.dtype).as_strided(shape, strides)
