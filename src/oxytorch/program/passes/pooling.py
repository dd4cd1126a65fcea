"""Passes over pooling, and over factors of channels, behind convolutions, whose results have their
channels side by side: torch's operators for that order are slow, or made for another one."""

from __future__ import annotations

import torch

from ..program import Argument, Some, Step, Value
from .convolution_times import LAST, PACKED, PACKED_TRANSPOSED
from .editor import Editor, known
from .own_convolutions import DEPTHWISE, PANELS
from .post_ops import is_activation

POOL, SCALE = "oxytorch::pool", "oxytorch::scale_channels"
_IN_ORDER = (
    PANELS, DEPTHWISE, PACKED, f"{PACKED}.binary", PACKED_TRANSPOSED, POOL, SCALE,
    "oxytorch::quantized_convolution",
)  # fmt: skip
"""Steps that return channels-last order."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX, _MAXES = "aten::max_pool{}d", "aten::max_pool{}d_with_indices"


def pools(editor: Editor) -> None:
    """Have our operator compute the largest values and means of windows where channels lie side by
    side."""
    for step in editor.steps.steps:
        if not step.arguments or not isinstance(step.arguments[0], Value):
            continue
        x = step.arguments[0]
        found = _pooled(step, x)
        if found is not None and _lies_in_order(editor, x) and not any(step.results[1:]):
            editor.replace(step, *found)
    editor.apply()


def factors_of_channels(editor: Editor) -> None:
    """Have our operator multiply images with a factor for each channel, as squeeze-and-excitation
    does it: a step of torch's amid ours ends the parallel region that these share."""
    for step in editor.steps.steps:
        if step.target != "aten::mul.Tensor":
            continue
        for x, factors in (step.arguments, step.arguments[::-1]):
            if _are_factors(x, factors) and _lies_in_order(editor, x):
                editor.replace(step, Step(SCALE, [x, factors], step.results))
                break
    editor.apply()


def _are_factors(x: Argument, factors: Argument) -> bool:
    """Whether a tensor has one number for each channel of images."""
    metas = [each.meta if isinstance(each, Value) else None for each in (x, factors)]
    if any(meta is None or meta.dim() not in LAST for meta in metas):
        return False
    image, factor = metas
    assert image is not None and factor is not None
    sizes = known(image.shape), known(factor.shape)
    if sizes[0] is None or sizes[1] is None or image.dtype not in _DTYPES:
        return False
    ones = (1,) * (image.dim() - 2)
    is_each = tuple(sizes[1]) == (*sizes[0][:2], *ones) and tuple(sizes[0][2:]) != ones
    return is_each and factor.dtype == image.dtype


def _lies_in_order(editor: Editor, x: Value) -> bool:
    maker = editor.maker.get(x)
    while maker is not None and (is_activation(maker) or maker.target == "add"):
        before = maker.arguments[0]
        maker = editor.maker.get(before) if isinstance(before, Value) else None
    return maker is not None and maker.target.removesuffix("_") in _IN_ORDER


def _pooled(step: Step, x: Value) -> list[Step] | None:
    """The steps in place of one that pools, if it is one that our operator computes."""
    meta = x.meta
    if meta is None or meta.dim() not in LAST or meta.dtype not in _DTYPES or not step.results:
        return None
    dims = meta.dim() - 2
    if _takes_largest(step, dims):
        return _largest(step, dims)
    if step.target in ("aten::mean.dim", f"aten::_adaptive_avg_pool{dims}d"):
        return _mean(step, x, dims)
    return None


def largest(step: Step) -> Step | None:
    """The step of our operator for one that takes the largest values of windows, for bytes too;
    None if it is none, or of sizes that our operator does not know."""
    x = step.arguments[0] if step.arguments else None
    if not isinstance(x, Value) or x.meta is None or x.meta.dim() not in LAST:
        return None
    dims = x.meta.dim() - 2
    made = _largest(step, dims) if _takes_largest(step, dims) else None
    return made[0] if made and not any(step.results[1:]) else None


def _takes_largest(step: Step, dims: int) -> bool:
    return step.target in (_MAX.format(dims), _MAXES.format(dims)) and bool(step.results)


def _largest(step: Step, dims: int) -> list[Step] | None:
    x, kernel, *rest = step.arguments
    stride, padding, dilation, ceil = [*rest, *_DEFAULTS[len(rest) :]]
    if ceil != "false":
        return None
    sizes = [
        _list(each, dims) for each in (kernel, stride if stride else kernel, padding, dilation)
    ]
    pads: list[Argument] = [size for size in sizes[2] for _ in range(2)]
    arguments: list[Argument] = [x, sizes[0], sizes[1], pads, sizes[3], '"max"']
    return [Step(POOL, arguments, step.results[:1])]


_DEFAULTS: tuple[Argument, ...] = ([], ["0"], ["1"], "false")
"""Of the arguments of torch's operators after the kernel's size."""


def _list(words: Argument, dims: int) -> list[Argument]:
    """One number for each dimension, of which torch takes one for all."""
    given = [*words] if isinstance(words, list) else [words]
    return given * dims if len(given) == 1 else given


def _mean(step: Step, x: Value, dims: int) -> list[Step] | None:
    """The mean of all positions, in whatever spelling."""
    (result,) = step.results
    assert x.meta is not None
    size = known(x.meta.shape)
    if size is None or 0 in size or result is None or result.meta is None:
        return None
    keeps = True
    if step.target == "aten::mean.dim":
        _, over, keep, dtype = step.arguments
        places = over.item if isinstance(over, Some) else over
        if not isinstance(places, list) or dtype != "none":
            return None
        if sorted(int(place) % len(size) for place in places) != [*range(2, len(size))]:
            return None
        keeps = keep == "true"
    elif step.arguments[1] != ["1"] * dims:
        return None
    ones, none = ["1"] * dims, ["0"] * (2 * dims)
    mean = result if keeps else Value(meta=x.meta.new_empty((*size[:2], *[1] * dims)))
    arguments: list[Argument] = [x, [*map(str, size[2:])], ones, none, ones, '"mean"']
    steps = [Step(POOL, arguments, [mean])]
    if not keeps:
        shape = [*map(str, size[:2])]
        steps.append(Step("aten::reshape", [mean, shape], [result], is_view=True))
    return steps
