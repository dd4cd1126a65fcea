"""Which arguments of a call are split among streams, and how their results are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class MultiStreamModuleHint:
    """Says for each argument of a call, or for the result, along which dimension it is split.

    An argument's hint is one of

    - an int: every tensor in the argument is split along this dimension; what is no tensor (None,
      numbers, strings) goes to every stream;
    - None: every stream gets the argument as it is; of results, the first stream's is taken;
    - a tuple, list or dict of hints: the argument is one of the same form.

    `MultiStreamModuleHint(0, mask=1)` is for `model(x, mask=mask)`. For a result, one positional
    hint is that of the result, several are those of a tuple, and keywords are those of a dict.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for hint in (*args, *kwargs.values()):
            _check(hint)
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        words = [*map(repr, self.args), *(f"{name}={hint}" for name, hint in self.kwargs.items())]
        return f"MultiStreamModuleHint({', '.join(words)})"

    def of_result(self) -> Any:
        """The hint as one of a single value."""
        if self.args and self.kwargs:
            raise ValueError(
                "MultiStreamModule: output_concat_hint: expected hints of a tuple or of a dict, "
                f"got both: {self}"
            )
        if self.kwargs:
            return self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args


def _check(hint: Any) -> None:
    if isinstance(hint, (tuple, list)):
        for each in hint:
            _check(each)
    elif isinstance(hint, dict):
        for each in hint.values():
            _check(each)
    elif hint is not None and (isinstance(hint, bool) or not isinstance(hint, int)):
        raise TypeError(
            "MultiStreamModuleHint: expected ints, None, and tuples, lists and dicts of them, "
            f"got {hint!r}"
        )


def is_plain(value: Any) -> bool:
    """Whether a value without a hint may go to every stream: there is nothing in it to split."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, _PLAIN)


def members(hint: Any, value: Any, name: str) -> list[tuple[Any, Any, str]]:
    """Hint, value and name of each member of a container, whose hint has to have its form."""
    if isinstance(hint, dict):
        if not isinstance(value, Mapping) or not hint.keys() <= value.keys():
            raise ValueError(
                f"MultiStreamModule: {name}: expected a dict with {[*hint]}, got {described(value)}"
            )
        return [(hint.get(key, ...), item, f"{name}[{key!r}]") for key, item in value.items()]
    if not isinstance(value, (tuple, list)) or len(value) != len(hint):
        raise ValueError(
            f"MultiStreamModule: {name}: expected a tuple or list of {len(hint)}, as its hint "
            f"{hint} is, got {described(value)}"
        )
    return [
        (each, item, f"{name}[{index}]")
        for index, (each, item) in enumerate(zip(hint, value, strict=True))
    ]


def rebuilt(value: Any, items: Sequence[Any]) -> Any:
    """A container like `value`, of other members."""
    if isinstance(value, Mapping):
        pairs = dict(zip(value, items, strict=True))
        return pairs if type(value) is dict else type(value)(**pairs)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def tensors_of(value: Any, name: str) -> tuple[list[Any], Any]:
    """The leaves of a value and its form; raises for a leaf that may hold more tensors."""
    leaves, form = tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise TypeError(
                f"MultiStreamModule: {name}: expected tensors to split, got {described(leaf)}; "
                "with the hint None every stream gets it as it is"
            )
    return leaves, form


def of_form(form: Any, leaves: Sequence[Any]) -> Any:
    """A value of these leaves."""
    return tree_unflatten(leaves, form)


def described(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {[*value]}"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
