"""Nested arguments and results: tuples, lists, dictionaries and named fields around leaves.

A `Structure` takes a value of its shape apart and builds one. It is made from a `TreeSpec` of
torch, or from a file, which names no class: what had one comes back as `Fields`.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree

_DEEPEST = 50


class Fields(OrderedDict[str, Any]):
    """A result with named fields: `result.logits`, `result["logits"]` and `result[0]`.

    Stands for a dataclass, a named tuple or an output of transformers in a process that reads a
    program from a file.
    """

    def __getitem__(self, key: Any) -> Any:
        return (
            tuple(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no field {name!r}, but {[*self]}") from None

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields' values."""
        return tuple(self.values())


@dataclass(frozen=True)
class Structure:
    """A leaf, or parts.

    kind: "leaf", "none", "tuple", "list", "dict", "fields" (named), or "class" (of torch's
        registry, which cannot be written to a file).
    keys: of a "dict" or "fields".
    spec: of what is made by torch.
    """

    kind: str
    parts: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    spec: _pytree.TreeSpec | None = None

    @classmethod
    def of(cls, spec: _pytree.TreeSpec) -> Structure:
        """The structure that torch describes."""
        if spec.is_leaf():
            return cls("leaf")
        parts = tuple(cls.of(child) for child in spec.children())
        if spec.type in (tuple, list):
            return cls(spec.type.__name__, parts)
        context = spec.context
        if spec.type in (dict, OrderedDict):
            return cls("dict", parts, tuple(context), None if spec.type is dict else spec)
        names = _field_names(spec)
        if names is None and issubclass(spec.type, tuple):  # torch.return_types
            return cls("tuple", parts, spec=spec)
        if names is None or len(names) != len(parts):
            return cls("class", parts, spec=spec)
        return cls("fields", parts, names, spec)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Where each leaf is: "x", "cache['k'][0]"."""
        if self.kind == "leaf":
            yield prefix
        for place, part in enumerate(self.parts):
            key = self.keys[place] if self.keys else place
            yield from part.names(f"{prefix}[{key!r}]")

    def count(self) -> int:
        """The number of leaves."""
        return 1 if self.kind == "leaf" else sum(part.count() for part in self.parts)

    def take_apart(self, value: Any, where: str) -> Iterator[Any]:
        """The leaves of a value. Raises TypeError, which says `where`, if it is another one."""
        if self.kind == "leaf":
            yield value
            return
        for place, (part, inner) in enumerate(
            zip(self.parts, self._children(value, where), strict=True)
        ):
            key = self.keys[place] if self.keys else place
            yield from part.take_apart(inner, f"{where}[{key!r}]")

    def _children(self, value: Any, where: str) -> Sequence[Any]:
        if self.kind in ("tuple", "list") and self.spec is None:
            kind = tuple if self.kind == "tuple" else list
            if type(value) is not kind or len(value) != len(self.parts):
                raise TypeError(
                    f"expected {where} to be a {self.kind} of {len(self.parts)}, got {_what(value)}"
                )
            return value
        if self.kind == "dict" or (self.kind == "fields" and isinstance(value, dict)):
            if not isinstance(value, dict) or {*value} != {*self.keys}:
                raise TypeError(
                    f"expected {where} to be a dict with {[*self.keys]}, got {_what(value)}"
                )
            return [value[key] for key in self.keys]
        if self.kind == "fields" and self.spec is None:
            try:
                return [getattr(value, key) for key in self.keys]
            except AttributeError:
                raise TypeError(
                    f"expected {where} to have the fields {[*self.keys]}, got {_what(value)}"
                ) from None
        assert self.spec is not None
        if type(value) is not _class(self.spec):
            raise TypeError(
                f"expected {where} to be a {_class(self.spec).__name__}, got {_what(value)}"
            )
        children, context = _pytree.SUPPORTED_NODES[self.spec.type].flatten_fn(value)
        if context != self.spec.context or len(children) != len(self.parts):
            raise TypeError(f"expected {where} to have the fields that it was exported with")
        return children

    def build(self, leaves: Iterator[Any]) -> Any:
        """A value around leaves."""
        if self.kind == "leaf":
            return next(leaves)
        parts = [part.build(leaves) for part in self.parts]
        if self.spec is not None:
            return _pytree.SUPPORTED_NODES[self.spec.type].unflatten_fn(parts, self.spec.context)
        if self.kind == "list":
            return parts
        if self.kind == "tuple":
            return tuple(parts)
        kind = Fields if self.kind == "fields" else dict
        return kind(zip(self.keys, parts, strict=True))

    def data(self) -> Any:
        """The structure as JSON. Raises ValueError where it holds a class that no file names."""
        if self.kind == "class":
            assert self.spec is not None
            raise ValueError(
                f"a {_class(self.spec).__name__} cannot be written to a file; export a model that "
                "takes and returns tensors in tuples, lists, dictionaries or dataclasses"
            )
        if self.kind == "leaf":
            return "leaf"
        if not all(type(key) in (str, int) for key in self.keys):
            raise ValueError(f"expected keys that are strings or integers, got {[*self.keys]}")
        return [self.kind, [*self.keys], [part.data() for part in self.parts]]

    @classmethod
    def read(cls, data: Any, depth: int = 0) -> Structure:
        """The structure that a file describes. Raises ValueError if it describes none."""
        if data == "leaf":
            return cls("leaf")
        if not isinstance(data, list) or len(data) != 3 or depth > _DEEPEST:
            raise ValueError(f"expected a structure, got {str(data)[:100]}")
        kind, keys, parts = data
        if kind not in ("tuple", "list", "dict", "fields") or not isinstance(parts, list):
            raise ValueError(f"expected a tuple, list, dict or fields, got {str(kind)[:100]}")
        wanted = len(parts) if kind in ("dict", "fields") else 0
        types = (str,) if kind == "fields" else (str, int)
        is_list = isinstance(keys, list) and all(type(key) in types for key in keys)
        if not is_list or len({*keys}) != wanted or len(keys) != wanted:
            raise ValueError(f"expected {wanted} different keys, got {str(keys)[:100]}")
        return cls(kind, tuple(cls.read(part, depth + 1) for part in parts), tuple(keys))


def _class(spec: _pytree.TreeSpec) -> type:
    """The class of the values that torch describes."""
    found: type = spec.context if spec.type is namedtuple else spec.type
    return found


def _field_names(spec: _pytree.TreeSpec) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass, a named tuple or an output of transformers."""
    kind, context = _class(spec), spec.context
    names: Any = None
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
    elif issubclass(kind, dict):
        names = context
    elif hasattr(kind, "__dataclass_fields__") and isinstance(context, list) and context:
        names = context[0]
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list else None


def _what(value: Any) -> str:
    if isinstance(value, dict):
        return f"a {type(value).__name__} with {[*value]}"
    is_sequence = isinstance(value, tuple | list)
    return f"a {type(value).__name__}" + (f" of {len(value)}" if is_sequence else "")
