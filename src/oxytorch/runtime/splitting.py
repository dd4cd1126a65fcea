"""The pieces of a call for several streams, and one result of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .gathering import Piece
from .hints import (
    MultiStreamModuleHint,
    described,
    is_plain,
    members,
    of_form,
    rebuilt,
    tensors_of,
)
from .pool import even_sizes


def split(
    hint: MultiStreamModuleHint, args: tuple[Any, ...], kwargs: dict[str, Any], streams: int
) -> list[Piece]:
    """The arguments of each stream's call.

    A batch of B items is split into min(B, streams) pieces whose sizes differ by one at most.
    """
    splitter = _Splitter(streams)
    of_args: list[Sequence[Any]] = [
        splitter.pieces(
            hint.args[index] if index < len(hint.args) else ..., value, f"args[{index}]"
        )
        for index, value in enumerate(args)
    ]
    of_kwargs = {
        name: splitter.pieces(hint.kwargs.get(name, ...), value, name)
        for name, value in kwargs.items()
    }
    if splitter.sizes is None:
        raise ValueError(
            "MultiStreamModule: expected an argument to split, got a call without one; "
            f"input_split_hint is {hint}"
        )
    return [
        (
            tuple([pieces[index] for pieces in of_args]),
            {name: pieces[index] for name, pieces in of_kwargs.items()},
        )
        for index in range(len(splitter.sizes))
    ]


class _Splitter:
    """Splits values into pieces of the sizes that the first tensor's size gives."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self.sizes: list[int] | None = None
        self._first = ""

    def pieces(self, hint: Any, value: Any, name: str) -> Sequence[Any]:
        """A piece for every stream; `...` is the hint of what has none."""
        if type(hint) is int and isinstance(value, Tensor):
            return self._of_tensor(hint, value, name)
        if hint is None or (hint is ... and is_plain(value)):
            return [value] * self._streams
        if hint is ...:
            raise ValueError(
                f"MultiStreamModule: {name}: expected a hint for {described(value)}; give "
                "input_split_hint=MultiStreamModuleHint(...) with a dimension for it, or with None "
                "if every stream is to get it as it is"
            )
        if isinstance(hint, int):
            leaves, form = tensors_of(value, name)
            parts = [
                self._of_tensor(hint, leaf, name)
                if isinstance(leaf, Tensor)
                else [leaf] * self._streams
                for leaf in leaves
            ]
            return [of_form(form, each) for each in zip(*parts, strict=False)]
        parts = [self.pieces(*each) for each in members(hint, value, name)]
        return [rebuilt(value, each) for each in zip(*parts, strict=False)]

    def _of_tensor(self, dim: int, tensor: Tensor, name: str) -> Sequence[Tensor]:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"MultiStreamModule: {name}: expected a tensor with a dimension {dim} to split, "
                f"got {described(tensor)}"
            )
        size = tensor.shape[dim]
        if self.sizes is None:
            self.sizes = even_sizes(size, max(1, min(size, self._streams)))
            self._first = name
        elif size != sum(self.sizes):
            raise ValueError(
                f"MultiStreamModule: {name}: expected {sum(self.sizes)} items along dimension "
                f"{dim}, as {self._first} has, got {described(tensor)}"
            )
        return tensor.split_with_sizes(self.sizes, dim)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Results that are kept where all streams return the same."""


def join(hint: Any, results: Sequence[Any], name: str = "output") -> Any:
    """One result of those of the streams."""
    first = results[0]
    if hint is None:
        return first
    if type(hint) is int:
        if isinstance(first, Tensor):
            return _concatenated(hint, results, name)
        return _joined_leaves(hint, results, name)
    members_of = [_members_of_result(hint, result, name) for result in results]
    parts = [
        join(group[0][0], [value for _, value, _ in group], group[0][2])
        for group in zip(*members_of, strict=True)
    ]
    return rebuilt(first, parts)


def _members_of_result(hint: Any, result: Any, name: str) -> list[tuple[Any, Any, str]]:
    found = members(hint, result, name)
    for each, _, where in found:
        if each is ...:
            raise ValueError(
                f"MultiStreamModule: {where}: expected a hint in output_concat_hint, got {hint}"
            )
    return found


def _joined_leaves(dim: int, results: Sequence[Any], name: str) -> Any:
    flat = [tree_flatten(result) for result in results]
    form = flat[0][1]
    for _, other in flat:
        if other != form:
            raise ValueError(f"{_cannot(name)}: streams return {form} and {other}")
    joined: list[Any] = []
    for group in zip(*(each for each, _ in flat), strict=True):
        if isinstance(group[0], Tensor):
            joined.append(_concatenated(dim, group, name))
        elif isinstance(group[0], _PLAIN) and len({(type(each), each) for each in group}) == 1:
            joined.append(group[0])
        else:
            raise ValueError(
                f"{_cannot(name)}: streams return {' and '.join(map(described, group))}"
            )
    return of_form(form, joined)


def _concatenated(dim: int, tensors: Sequence[Any], name: str) -> Tensor:
    try:
        return torch.cat(tensors, dim)  # type: ignore[arg-type]
    except (RuntimeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{_cannot(name)} along dimension {dim}: {', '.join(map(described, tensors))}"
        ) from error


def _cannot(name: str) -> str:
    return (
        f"MultiStreamModule: {name} cannot be joined (give output_concat_hint, or "
        "concat_output=False for a list)"
    )
