"""What operators do with their arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_OF_FORM = frozenset(
    ["as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_",
     "swapdims_", "t_", "transpose_", "unsqueeze_"]
)  # fmt: skip

_UNTOLD = {
    **dict.fromkeys(
        ["_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"], "self"
    ),
    "set_": "source",
}
"""Arguments whose memory a result shares without the schema saying so."""


class Uses(NamedTuple):
    """What an operator does with its arguments: their names, those that it writes to, and those
    that its result is an alias of.

    takes_out: for each argument whether it is one of the latter.
    is_simple: whether nothing is written, and no argument is a list of tensors.
    is_of_form: whether what it writes is the shape and the memory of a tensor object, not values.
    may_return_it: whether it calls others, and none where there is nothing to do, as `to` does
        with the dtype that a tensor has. Inference mode passes such an operator on as it is.
    """

    names: tuple[str, ...]
    written: frozenset[str]
    aliased: frozenset[str]
    takes_out: tuple[bool, ...]
    is_simple: bool
    is_of_form: bool
    may_return_it: bool = False


@functools.cache
def uses_of(func: Any) -> Uses:
    """What an operator does with its arguments, by its schema."""
    arguments = func._schema.arguments
    marked = [a for a in arguments if a.alias_info is not None]
    written = frozenset(a.name for a in marked if a.alias_info.is_write)
    name = func._schema.name.partition("::")[2]
    aliased = frozenset(a.name for a in marked if not a.alias_info.is_write)
    aliased |= {_UNTOLD.get(name)} & {a.name for a in arguments}
    has_lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments)
    return Uses(
        tuple(a.name for a in arguments),
        written,
        aliased,
        tuple(a.name in aliased for a in arguments),
        not written and not has_lists,
        bool(written) and name in _OF_FORM,
        bool(aliased) and not written and func._can_decompose(),
    )


class PlainArguments:
    """The arguments of an operator, with plain values for packed weights, which are of a `kind`."""

    def __init__(
        self, kind: type[Any], uses: Uses, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._kind, self._uses = kind, uses
        self._replaced: dict[int, tuple[Any, Tensor]] = {}
        self._given = {**dict(zip(uses.names, args, strict=False)), **kwargs}
        # Those that are written to come first: another name may stand for the same weight.
        order = sorted(self._given, key=lambda name: name not in uses.written)
        plain = {name: self._plain(name) for name in order}
        self.args = [plain[name] for name in uses.names[: len(args)]]
        self.kwargs = {name: plain[name] for name in kwargs}

    def _plain(self, name: str) -> Any:
        takes_out = name in self._uses.written or name in self._uses.aliased

        def plain(value: Any) -> Any:
            if not isinstance(value, self._kind):
                return value
            if takes_out or id(value) not in self._replaced:
                values = value.plain() if takes_out else value.values()
                self._replaced[id(value)] = (value, values)
            return self._replaced[id(value)][1]

        return pytree.tree_map(plain, self._given[name])

    def returned(self, result: Any) -> Any:
        """The operator's result: the weights themselves for their plain values."""
        if not self._uses.written:
            return result
        for name in self._uses.written & self._given.keys():
            for leaf in pytree.tree_leaves(self._given[name]):
                if not isinstance(leaf, self._kind):
                    continue
                plain = self._replaced[id(leaf)][1]
                if self._uses.is_of_form and not isinstance(leaf, nn.Parameter):
                    leaf.became(plain)
                else:
                    leaf.was_written(plain)
        back = {id(plain): own for own, plain in self._replaced.values()}
        return pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), result)
