"""Passes that leave out what is computed twice or for nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ..program import Argument, Some, Step, Value
from .editor import VIEWS, Editor, are_same


def simplify(editor: Editor) -> None:
    """Leave out copies, views that change nothing, and steps that were done before."""
    if editor.steps.has_effect:
        return  # what is written to must not be shared
    returned = escaping(editor)
    _leave_out_copies(editor, returned)
    join_views(editor)
    _share(editor, returned)


def escaping(editor: Editor) -> set[Value]:
    """The outputs, and what they may share their memory with: users may write to these."""
    found = set(editor.steps.outputs)
    for step in reversed(editor.steps.steps):
        if step.is_view and any(value in found for value in step.results):
            found |= {a for a in step.arguments if isinstance(a, Value)}
    return found


def _leave_out_copies(editor: Editor, returned: set[Value]) -> None:
    for _, source, result in _of(editor, "aten::clone"):
        if result not in returned and _lie_alike(source, result):
            editor.redirect(result, source)
    editor.apply()


def _of(editor: Editor, *targets: str) -> Iterator[tuple[Step, Value, Value]]:
    """The steps of one tensor of these kinds, with it and with their result."""
    for step in editor.steps.steps:
        if step.target in targets:
            source, (result,) = step.arguments[0], step.results
            if isinstance(source, Value) and result is not None:
                yield step, source, result


def _lie_alike(a: Value, b: Value) -> bool:
    if a.meta is None or b.meta is None:
        return False
    has_same_bits = a.meta.is_conj() == b.meta.is_conj() and a.meta.is_neg() == b.meta.is_neg()
    is_alike = are_same(a.meta.shape, b.meta.shape) and has_same_bits
    return is_alike and are_same(a.meta.stride(), b.meta.stride())


def join_views(editor: Editor) -> None:
    """A view of a view is one of the first tensor; one of the same shape is that tensor."""
    for step, source, _ in _of(editor, *VIEWS):
        before = editor.made_by(source, *VIEWS)
        if before is not None and not editor.is_changed(before):
            first = before.arguments[0]
            editor.replace(step, step.with_arguments([first, *step.arguments[1:]]))
    editor.apply()
    for _, source, result in _of(editor, *VIEWS):
        if result not in editor.outputs and _lie_alike(source, result):
            editor.redirect(result, source)
    editor.apply()


def _share(editor: Editor, returned: set[Value]) -> None:
    """Do what is done twice, once."""
    done: dict[Hashable, Step] = {}
    same = _same_numbers(editor)
    for step in editor.steps.steps:
        key = (step.target, step.returns_list, _key(step.arguments, same))
        first = done.setdefault(key, step)
        places = [i for i, value in enumerate(step.results) if value is not None]
        if first is step or any(first.results[place] is None for place in places):
            continue
        pairs = [(step.results[place], first.results[place]) for place in places]
        if any(own in returned or other in returned for own, other in pairs):
            continue
        for own, other in pairs:
            assert own is not None and other is not None
            same[own] = other
            editor.redirect(own, other)
    editor.apply()


def _same_numbers(editor: Editor) -> dict[Value, Value]:
    """Constants without dimensions, and the first that is equal."""
    first: dict[Hashable, Value] = {}
    same: dict[Value, Value] = {}
    for value, tensor in editor.steps.constants.items():
        if not tensor.dim():
            other = first.setdefault((tensor.dtype, repr(tensor.item())), value)
            if other is not value:
                same[value] = other
    return same


def _key(argument: Argument, same: dict[Value, Value]) -> Hashable:
    if isinstance(argument, Value):
        return same.get(argument, argument)
    if isinstance(argument, Some):
        return "some", _key(argument.item, same)
    if isinstance(argument, list | tuple):
        return tuple([_key(item, same) for item in argument])
    return str(argument)
