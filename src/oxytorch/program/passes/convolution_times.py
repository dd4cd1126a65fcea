"""Which way of computing a convolution is the fastest, by timing torch's own beside the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...rewriting.measure import CLEAR_GAIN, about, first_win, numbers
from ..program import Step
from .editor import Editor
from .post_ops import is_activation

CONVOLUTION = "aten::convolution"
PACK = "mkldnn::_reorder_convolution_weight"
PACK_TRANSPOSED = "mkldnn::_reorder_convolution_transpose_weight"
PACKED = "mkldnn::_convolution_pointwise"
PACKED_TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The orders with channels last, by numbers of dimensions."""


class Ways(NamedTuple):
    """Torch's own convolution and that with a packed weight, and what their times depend on.

    given: the input that others take, once it is needed, in channels-last order but where it is
    taken to have torch's. weight: the same numbers as both have. returned: what becomes of a
    result.
    """

    key: Hashable
    plain: Callable[[], Tensor]
    packed: Callable[[], Tensor]
    given: Callable[[], Tensor]
    weight: Callable[[], Tensor]
    returned: Callable[[Tensor], Tensor]


def geometry_of(step: Step) -> list[Any]:
    """Padding, stride, dilation and groups as oneDNN's operators take them, for two dimensions
    where it has one; for a transposed convolution the padding of the result after the first."""
    stride, padding, dilation, transposed, more, groups = step.arguments[3:]
    pairs = [(padding, 0), (more, 0), (stride, 1), (dilation, 1)]
    if transposed == "false":
        del pairs[1]
    is_flat = len(stride) == 1
    return [
        *([neutral] * is_flat + [int(each) for each in word] for word, neutral in pairs),
        int(groups),
    ]


def winners(editor: Editor, steps: list[Step]) -> set[Step]:
    """The convolutions that are faster with packed weights.

    Those of one dimension win or lose together, since they mostly exchange tensors, and have to be
    faster by more: other operators may be slower in their order.
    """
    ways = {step: ways_of(editor, step, steps) for step in steps}
    flat = [step for step in steps if step.arguments[0].meta.dim() == 3]
    wins = set()
    for step in steps:
        both = ways[step].plain, ways[step].packed
        if step not in flat and first_win(ways[step].key, [both]) is not None:
            wins.add(step)
    if flat:

        def plain() -> Tensor:
            return [ways[step].plain() for step in flat][-1]

        def packed() -> Tensor:
            return [ways[step].packed() for step in flat][-1]

        keys = tuple(ways[step].key for step in flat)
        if first_win(keys, [(plain, packed)], CLEAR_GAIN) is not None:
            wins |= {*flat}
    return wins


def _torchs_order(editor: Editor, step: Step, steps: list[Step]) -> tuple[bool, bool]:
    """Whether what a convolution takes, and what it returns, is taken to have torch's order: where
    it is the only one; of one dimension also where no other one or transposition is next to it."""
    if len(steps) == 1:
        return True, True
    if step.arguments[0].meta.dim() != 3:
        return False, False
    before = editor.maker.get(step.arguments[0])
    while before is not None and is_activation(before):
        before = editor.maker.get(before.arguments[0])
    taken = before is None or before.target not in _NEXT
    todo, returned = [*editor.takers.get(step.results[0], [])], False  # type: ignore[arg-type]
    while todo:
        taker = todo.pop()
        if is_activation(taker) and taker.results[0] is not None:
            todo += editor.takers.get(taker.results[0], [])
        else:
            returned |= taker.target not in _NEXT
    return taken, returned


_NEXT = (CONVOLUTION, "aten::transpose.int", "aten::permute")


def ways_of(editor: Editor, step: Step, steps: list[Step]) -> Ways:
    """Ways of computing a convolution, of all those that may change."""
    takes, returns = _torchs_order(editor, step, steps)
    x, weight = step.arguments[0].meta, step.arguments[1].meta
    geometry, is_transposed = geometry_of(step), step.arguments[6] != "false"
    size, channels = tuple(x.shape), tuple(map(about, weight.shape[:2]))
    frozen = tuple(map(tuple, geometry[:-1])), geometry[-1], is_transposed
    key = ("program", takes, returns, channels, tuple(weight.shape[2:]), weight.dtype, frozen, size)
    targets = (PACK_TRANSPOSED, PACKED_TRANSPOSED) if is_transposed else (PACK, PACKED)
    pack, run = (getattr(torch.ops.mkldnn, target.split("::")[1]) for target in targets)
    lists = [[int(each) for each in word] for word in (*step.arguments[3:6], step.arguments[7])]

    def wide(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(2) if x.dim() == 3 else tensor

    @cache  # made where times are not known yet
    def given() -> Tensor:
        return numbers(*size).to(x.dtype)

    @cache
    def values() -> Tensor:
        return numbers(*weight.shape).to(x.dtype)

    @cache
    def ordered() -> Tensor:
        tensor = wide(given())
        return tensor if takes else tensor.contiguous(memory_format=LAST[tensor.dim()])

    @cache
    def weight_packed() -> Tensor:
        found: Tensor = pack.default(wide(values()), *geometry, [*wide(given()).shape])
        return found

    def plain() -> Tensor:
        stride, padding, dilation, more = lists
        return torch.convolution(
            given(), values(), None, stride, padding, dilation, is_transposed, more, geometry[-1]
        )

    def packed() -> Tensor:
        return returned(run.default(ordered(), weight_packed(), None, *geometry, "none", [], ""))

    def returned(found: Tensor) -> Tensor:
        return found.contiguous() if returns else found

    return Ways(key, plain, packed, ordered, values, returned)
