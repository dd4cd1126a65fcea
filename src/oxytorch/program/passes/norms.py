"""Passes over normalizations and gates: each is one sweep over memory."""

from __future__ import annotations

from typing import Any

import torch

from ..program import Some, Step, Value
from .editor import Editor, are_same, is_contiguous

LAYER_NORM = "aten::native_layer_norm"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_norms(editor: Editor) -> None:
    """Have layer normalization of rows computed by the kernel of this package."""
    for step in editor.steps.steps:
        if step.target != LAYER_NORM:
            continue
        x, shape, weight, bias, eps = step.arguments
        if any(step.results[1:]):
            editor.leave(step, "a gradient is asked for")
            continue
        if len(shape) != 1 or x.meta is None or x.meta.dtype not in DTYPES or 0 in x.meta.shape:
            editor.leave(step, "the kernel takes rows of float32, bfloat16 or float16")
            continue
        is_ours = all(_fits(each, x.meta.dtype) for each in (weight, bias))
        if is_ours and is_contiguous(step.results[0]):
            made = [x, weight, bias, eps]
            editor.replace(step, Step("oxytorch::layer_norm", made, step.results[:1]))
        else:
            editor.leave(step, "weight and bias differ in dtype, or x is in another order")
    editor.apply()


def sums_before_norms(editor: Editor) -> None:
    """Have the sum before a normalization computed in its sweep."""
    joined = {
        "oxytorch::layer_norm": "oxytorch::add_layer_norm",
        "oxytorch::rms_norm": "oxytorch::add_rms_norm",
    }
    for step in editor.steps.steps:
        if step.target not in joined:
            continue
        x, *rest = step.arguments
        total = editor.made_by(x, "add")
        if total is None or editor.is_changed(total):
            continue
        if not _is_plain_sum(total, x) or not is_contiguous(x):
            editor.leave(step, "the sum before it is of two shapes or dtypes, or in another order")
            continue
        is_taken = editor.only_taker(x) is not step
        if is_taken and not _is_first(editor, total, step):
            editor.leave(step, "its weight is made after the sum before it")
            continue
        arguments = [*total.arguments[:2], *rest, str(is_taken).lower()]
        results = [step.results[0], x if is_taken else None]
        made = Step(joined[step.target], arguments, results)
        first, last = (total, step) if is_taken else (step, total)
        editor.replace(first, made)
        editor.replace(last)
    editor.apply()


def _fits(argument: Any, dtype: torch.dtype) -> bool:
    if not isinstance(argument, Some):
        return True
    meta = argument.item.meta
    return meta is not None and meta.dtype in (dtype, torch.float32)


def _is_plain_sum(step: Step, total: Value) -> bool:
    """Whether a step adds two tensors of the sum's own shape and dtype."""
    first, second, factor = step.arguments
    meta = total.meta
    return factor == "1.0" and all(
        isinstance(each, Value)
        and each.meta is not None
        and meta is not None
        and are_same(each.meta.shape, meta.shape)
        and each.meta.dtype == meta.dtype
        for each in (first, second)
    )


def _is_first(editor: Editor, total: Step, step: Step) -> bool:
    """Whether weight and bias of a normalization exist when the sum before it is made."""
    steps = editor.steps.steps
    place = steps.index(total)
    given = [each.item for each in step.arguments[1:] if isinstance(each, Some)]
    makers = [editor.maker[value] for value in given if value in editor.maker]
    return all(steps.index(maker) < place for maker in makers)


def gates(editor: Editor) -> None:
    """Have silu(gate) * up and gelu(gate) * up computed in one sweep."""
    for step in editor.steps.steps:
        if step.target != "aten::mul.Tensor" or not is_contiguous(step.results[0]):
            continue
        for gate, up in (step.arguments, step.arguments[::-1]):
            made = editor.made_by(gate, "aten::silu", "aten::gelu")
            if made is None or editor.only_taker(gate) is not step or editor.is_changed(made):
                continue
            source = made.arguments[0]
            if not _are_alike(source, up):
                continue
            rest = made.arguments[1:]
            name = "silu_mul" if made.target == "aten::silu" else "gelu_mul"
            editor.replace(step, Step(f"oxytorch::{name}", [source, up, *rest], step.results))
            break
    editor.apply()


def _are_alike(a: Any, b: Any) -> bool:
    first, second = (each.meta if isinstance(each, Value) else None for each in (a, b))
    if first is None or second is None or first.dtype not in DTYPES:
        return False
    return are_same(first.shape, second.shape) and first.dtype == second.dtype


def rms_norms(editor: Editor) -> None:
    """Have x * rsqrt(mean(x^2) + eps) * weight computed in one sweep."""
    for step in editor.steps.steps:
        found = _rms_norm(editor, step) if step.target == "aten::rsqrt" else None
        if found is not None and is_contiguous(found[-1].results[0]):
            *arguments, last = found
            editor.replace(last, Step("oxytorch::rms_norm", arguments, last.results))
    editor.apply()


def _rms_norm(editor: Editor, root: Step) -> tuple[Value, Any, str, Step] | None:
    """Input, weight, eps and last step of the RMS normalization whose root this is."""
    shifted = editor.made_by(root.arguments[0], "add")
    if shifted is None:
        return None
    eps = editor.number(shifted.arguments[1])
    mean = editor.made_by(shifted.arguments[0], "aten::mean.dim")
    if not isinstance(eps, float) or mean is None or shifted.arguments[2] != "1.0":
        return None
    square = editor.made_by(mean.arguments[0], "aten::mul.Tensor")
    if square is None or square.arguments[0] is not square.arguments[1]:
        return None
    x = square.arguments[0]
    if not isinstance(x, Value) or x.meta is None or x.meta.dtype not in DTYPES:
        return None
    if not _is_mean_of_rows(mean, x.meta.dim()) or 0 in x.meta.shape:
        return None
    scaled = _only(editor, root.results[0], "aten::mul.Tensor")
    if scaled is None or not _takes(scaled, x, root.results[0]):
        return None
    source, last = x, scaled
    widened = editor.made_by(x, "aten::_to_copy")
    if widened is not None:  # computed in float32, as in the models of transformers
        narrowed = _only(editor, scaled.results[0], "aten::_to_copy")
        source = widened.arguments[0]
        if narrowed is None or not isinstance(source, Value) or source.meta is None:
            return None
        result = narrowed.results[0]
        if result is None or result.meta is None or result.meta.dtype != source.meta.dtype:
            return None
        last = narrowed
    product = _only(editor, last.results[0], "aten::mul.Tensor")
    if product is not None:
        weight = next((a for a in product.arguments if a is not last.results[0]), None)
        is_row = isinstance(weight, Value) and weight.meta is not None and weight.meta.dim() == 1
        assert source.meta is not None
        if is_row and _fits(Some(weight), source.meta.dtype):
            is_kept = product.results[0] is not None and product.results[0].meta is not None
            if is_kept and product.results[0].meta.dtype == source.meta.dtype:  # type: ignore[union-attr]
                return source, Some(weight), repr(eps), product
    return source, "none", repr(eps), last


def _only(editor: Editor, value: Value | None, target: str) -> Step | None:
    taker = None if value is None else editor.only_taker(value)
    return taker if taker is not None and taker.target == target else None


def _takes(step: Step, *values: Value | None) -> bool:
    return {*step.arguments} == {*values}


def _is_mean_of_rows(step: Step, dims: int) -> bool:
    _, places, keeps, dtype = step.arguments
    listed = places.item if isinstance(places, Some) else places
    is_last = isinstance(listed, list) and listed in (["-1"], [str(dims - 1)])
    return is_last and keeps == "true" and dtype == "none"
