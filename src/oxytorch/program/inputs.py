"""What a module is called with: the form that calls of one program share, and their tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from ..core.watched import PLAIN
from .outputs import CONSTANTS


class ForeignError(Exception):
    """An argument that no program can take."""


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call: what it is given, the form that it shares with others, and its tensors in the order
    in which a program takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Hashable
    tensors: list[Tensor]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        """Raises ForeignError."""
        return cls(args, kwargs, *form_of_call(args, kwargs))

    def has_kept_its_form(self) -> bool:
        """Whether nobody has changed what it was given to something of another form."""
        return form_of_call(self.args, self.kwargs)[0] == self.form


def form_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[Tensor]]:
    """What calls must have in common for one program to hold, and the tensors of this one."""
    tensors: list[Tensor] = []
    form = _described(args, tensors), _described(kwargs, tensors)
    aliases = tuple(
        (first, i) for i, t in enumerate(tensors) for first in range(i) if tensors[first] is t
    )
    # Numbers become tensors of the default dtype, which nothing else shows.
    return (form, aliases, torch.get_default_dtype()), tensors


def _is_note_of_torch(name: str) -> bool:
    """Whether an attribute is a note of torch's compiler or exporter, which no model reads."""
    return name.startswith(("_dynamo_", "_has_dynamo_", "_specialize_on"))


def without_sizes(form: Hashable) -> Hashable:
    """The form of a call without the shapes and strides of its tensors."""
    if not isinstance(form, tuple):
        return form
    if len(form) == 5 and type(form[0]) is torch.Size:  # a tensor, as below
        return len(form[0]), form[1], *form[3:]
    return tuple(map(without_sizes, form))


def _described(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if kind in PLAIN:
        if value.is_nested or value.layout != torch.strided or value.device.type != "cpu":
            raise ForeignError("an input is no plain tensor on the CPU")
        if value.__dict__ and (own := sorted(filterfalse(_is_note_of_torch, value.__dict__))):
            raise ForeignError(
                f"an input has attributes of its own ({', '.join(own)}), which may change; pass "
                "its .detach(), which has none"
            )
        tensors.append(value)
        # Not where it begins in its memory, which no code that was recorded asks for.
        return value.shape, value.dtype, value.stride(), kind, value.requires_grad
    if kind in CONSTANTS:
        return kind, value if value or kind is not float else repr(value)  # 0.0 equals -0.0
    if kind is tuple or kind is list:
        return kind, tuple([_described(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(k, _described(item, tensors)) for k, item in value.items()])
    raise ForeignError(f"an input is a {kind.__name__}, which may carry state")
