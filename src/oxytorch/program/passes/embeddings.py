"""Passes over embedding bags."""

from __future__ import annotations

from typing import Any

from ..program import Some, Step, Value
from .editor import Editor, are_same, is_contiguous
from .norms import DTYPES

BAG = "oxytorch::embedding_bag"
MERGED = {
    BAG: "oxytorch::merged_embedding_bag",
    "oxytorch::quantized_embedding_bag": "oxytorch::quantized_merged_embedding_bag",
}
"""What looks up the bags of several tables, by what looks up those of one."""
_MODES = {"0": "sum", "1": "mean"}


def embedding_bags(editor: Editor) -> None:
    """Have bags of embeddings computed by the kernel of this package."""
    for step in editor.steps.steps:
        if step.target != "aten::_embedding_bag":
            continue
        if any(step.results[1:]):
            editor.leave(step, "a gradient is asked for")
            continue
        weight, indices, offsets, _, mode, _, weights, includes_last, padding = step.arguments
        is_known = weight.meta is not None and weight.meta.dtype in DTYPES
        is_known = is_known and is_contiguous(step.results[0])
        if padding != "-1" or mode not in _MODES or not is_known:
            editor.leave(step, "the kernel sums or averages, without a padding index")
            continue
        arguments = [weight, indices, Some(offsets), f'"{_MODES[mode]}"', weights, includes_last]
        editor.replace(step, Step(BAG, arguments, step.results[:1]))
    editor.apply()


def merged_bags(editor: Editor) -> None:
    """Look up the bags of several tables in one sweep."""
    groups: list[list[Step]] = []
    places = {step: place for place, step in enumerate(editor.steps.steps)}
    for step in places:
        if step.target not in MERGED or not _is_plain(step):
            continue
        alike = (group for group in groups if _are_alike(group[0], step))
        group = next(alike, None)
        if group is None:
            groups.append([step])
        elif all(places[step] < places[each] for bag in group for each in _takers(editor, bag)):
            group.append(step)
    for group in groups:
        if len(group) > 1:
            _merge(editor, group)
    editor.apply()


def _is_plain(bag: Step) -> bool:
    """Whether the merged lookup has all arguments that this one has."""
    _, _, offsets, _, weights, includes_last, *_ = bag.arguments
    return isinstance(offsets, Some) and weights == "none" and includes_last == "false"


def _takers(editor: Editor, bag: Step) -> list[Step]:
    return editor.takers.get(_result(bag), [])


def _result(bag: Step) -> Value:
    (result,) = bag.results
    assert result is not None
    return result


def _are_alike(a: Step, b: Step) -> bool:
    """Whether two lookups have the same mode, number of bags, kind of rows and of results."""
    first, second = (_result(step).meta for step in (a, b))
    settings = [[step.target, step.arguments[3], *step.arguments[6:]] for step in (a, b)]
    if settings[0] != settings[1] or first is None or second is None:
        return False
    kinds = [[getattr(v.meta, "dtype", None) for v in s.taken] for s in (a, b)]
    return None not in kinds[0] and kinds[0] == kinds[1] and are_same(first.shape, second.shape)


def _merge(editor: Editor, group: list[Step]) -> None:
    """Put one lookup where the last one of a group is; nobody takes a result before."""
    weights, indices, offsets = ([step.arguments[i] for step in group] for i in range(3))
    together, parted = Value(), Value()
    lists = [weights, indices, [each.item for each in offsets]]
    results = [*map(_result, group)]
    meta: Any = results[0].meta
    sizes = ["-1", str(len(group)), str(meta.shape[1])]
    first = group[0]
    settings = [first.arguments[3], *first.arguments[6:]]
    call = Step(MERGED[first.target], [*lists, *settings], [together])
    for step in group[:-1]:
        editor.replace(step)
    editor.replace(
        group[-1],
        call,
        Step("aten::view", [together, sizes], [parted], is_view=True),
        Step("aten::unbind.int", [parted, "1"], results, returns_list=True, is_view=True),
    )
