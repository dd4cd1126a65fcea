"""Pass over scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...ops.attention import MOST_DIM, is_fast
from ...rewriting.measure import first_win, numbers
from ..program import Argument, Some, Step, Value
from .editor import Editor, are_same, is_same, known

TORCHS, OURS = "aten::_scaled_dot_product_flash_attention_for_cpu", "oxytorch::attention"
WHOLE = "aten::scaled_dot_product_attention"
"""As `torch.export` leaves it."""
DTYPES = (torch.float32, torch.bfloat16)
_ELSEWHERE = (
    "the kernel takes a known number of heads in float32 or bfloat16 without dropout, with the "
    "heads of a row side by side"
)
USUAL = ((1, 16), (1, 128), (8, 128), (1, 512))
"""Batch sizes and lengths that are timed where they are not known, from little work to much."""


def attention(editor: Editor) -> None:
    """Have attention computed by the kernel of this package, where it is faster; where sizes are
    not known, at all that are usual."""
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
        if dropout != "0.0" or not all(map(_fits, metas)) or not _lies_by_rows(metas[0]):
            editor.leave(step, _ELSEWHERE)
            continue
        if mask != "none" and not _is_mask(_meta(mask.item)):
            editor.leave(step, "its mask has other than four dimensions, or no elements")
            continue
        if not _pays(metas, None if mask == "none" else _meta(mask.item), is_causal == "true"):
            editor.leave(step, "the kernel was timed and is not faster than torch's")
        else:
            arguments = [query, key, value, _own(editor, mask), scale, is_causal, "false"]
            editor.replace(step, Step(OURS, arguments, step.results[:1]))
    editor.apply()


def _meta(value: Any) -> Any:
    return value.meta if isinstance(value, Value) else None


def _is_mask(meta: Any) -> bool:
    if meta is None or meta.dim() != 4 or meta.dtype not in (*DTYPES, torch.bool):
        return False
    return all(type(size) is not int or size > 0 for size in meta.shape)


def _fits(meta: Any) -> bool:
    """Whether the kernel takes such a tensor, whatever its batch size and length are."""
    if not _is_mask(meta) or meta.dtype not in DTYPES:
        return False
    _, heads, _, dim = meta.shape
    return type(heads) is int and type(dim) is int and dim <= MOST_DIM


def _lies_by_rows(query: Any) -> bool:
    """Whether torch's result, which lies in memory as the query does, lies there as ours: as
    [batch, length, heads, dim]."""
    if not _fits(query):
        return False
    batch, heads, length, dim = query.shape
    if known(query.shape) is None:
        of_batch, of_head, of_row, one = query.stride()
        is_row = type(of_row) is int and of_row >= heads * dim
        is_dense = is_same(one, 1) and (heads == 1 or is_same(of_head, dim))
        return is_row and is_dense and (is_same(batch, 1) or is_same(of_batch, length * of_row))
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


def pays_written_out(metas: list[Any], mask: Any) -> bool:
    """Whether the kernel takes query, key, value and mask of such forms, and is faster than two
    products with a softmax between them."""
    if not all(map(_fits, metas)) or any(meta.dtype != metas[0].dtype for meta in metas):
        return False
    if mask is not None and (0 in mask.shape or mask.dtype not in (torch.float32, metas[0].dtype)):
        return False
    return _pays(metas, mask, False, is_written_out=True)


def _pays(
    metas: list[Tensor], mask: Tensor | None, is_causal: bool, is_written_out: bool = False
) -> bool:
    query, key, value = metas
    ends = [[meta.shape[0], meta.shape[3]] for meta in (query, key)]
    if not (are_same(key.shape, value.shape) and are_same(*ends)):
        return False
    if query.shape[1] % key.shape[1]:
        return False
    every = [*metas] if mask is None else [*metas, mask]
    if any(known(meta.shape) is None for meta in every):
        sizes = [[_of_size(meta, *size) for meta in every] for size in USUAL]
    else:
        sizes = [every]
    form = tuple((tuple(t.shape), t.stride(), t.dtype) for given in sizes for t in given)
    calls = [_calls(given, is_causal, is_written_out) for given in sizes]
    name = f"program attention{' written out' * is_written_out}"
    return first_win((name, form, is_causal), calls) == 0


def _of_size(meta: Tensor, batch: int, length: int) -> Tensor:
    """A tensor like this one, in which sizes that are not known have these values."""
    usual = (batch, 1, length, length)[4 - meta.dim() :]
    shape = [s if type(s) is int else own for s, own in zip(meta.shape, usual, strict=True)]
    if (
        meta.dim() == 4 and type(meta.shape[1]) is int and meta.shape[1] > 1
    ):  # no mask, or one of each head
        rows = (shape[0], shape[2], shape[1], shape[3])
        return torch.empty(rows, dtype=meta.dtype, device="meta").transpose(1, 2)
    return torch.empty(shape, dtype=meta.dtype, device="meta")


def _calls(
    given: list[Tensor], is_causal: bool, is_written_out: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Torch's attention, or the products and the softmax, and ours, of tensors like these: query,
    key, value and a mask."""
    ours = torch.ops.oxytorch.attention.default

    @cache
    def tensors() -> tuple[list[Tensor], Tensor | None]:
        masks = [
            torch.full(tuple(mask.shape), mask.dtype == torch.bool, dtype=mask.dtype, device="cpu")
            for mask in given[3:]  # which hides nothing
        ]
        return [_alike(meta) for meta in given[:3]], masks[0] if masks else None

    def run_plain() -> Tensor:
        (query, key, value), mask = tensors()
        if is_written_out:
            group = query.shape[1] // key.shape[1]
            if group > 1:
                key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            scores = torch.matmul(query, key.mT)
            weights = torch.ops.oxytorch.softmax.default(scores, 1.0, mask)
            return torch.matmul(weights, value).transpose(1, 2).contiguous()
        groups = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, enable_gqa=groups
        )

    def run_ours() -> Tensor:
        made, mask = tensors()
        found: Tensor = ours(*made, mask, None, is_causal)
        return found

    return run_plain, run_ours


def _alike(meta: Tensor) -> Tensor:
    """A tensor of the same shape and strides, also where places share memory."""
    shape, strides = tuple(meta.shape), meta.stride()
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return numbers(count).to(meta.dtype).as_strided(shape, strides)
