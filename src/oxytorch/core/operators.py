"""What operators do with their arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

_OF_FORM = frozenset(
    ["as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_",
     "swapdims_", "t_", "transpose_", "unsqueeze_"]
)  # fmt: skip


class Uses(NamedTuple):
    """What an operator does with its arguments: their names, those that it writes to, and those
    that its result is an alias of.

    takes_out: for each argument whether it is one of the latter.
    is_simple: whether nothing is written, and no argument is a list of tensors.
    is_of_form: whether what it writes is the shape and the memory of a tensor object, not values.
    """

    names: tuple[str, ...]
    written: frozenset[str]
    aliased: frozenset[str]
    takes_out: tuple[bool, ...]
    is_simple: bool
    is_of_form: bool


@functools.cache
def uses_of(func: Any) -> Uses:
    """What an operator does with its arguments, by its schema."""
    arguments = func._schema.arguments
    marked = [a for a in arguments if a.alias_info is not None]
    written = frozenset(a.name for a in marked if a.alias_info.is_write)
    aliased = frozenset(a.name for a in marked if not a.alias_info.is_write)
    has_lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments)
    return Uses(
        tuple(a.name for a in arguments),
        written,
        aliased,
        tuple(a.name in aliased for a in arguments),
        not written and not has_lists,
        bool(written) and func._schema.name.partition("::")[2] in _OF_FORM,
    )
