"""Weights in the order that a kernel wants, which still look like the tensor that the user gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree as pytree

_Self = TypeVar("_Self", bound="PackedTensor")


class PackedTensor(torch.Tensor):
    """A tensor stored in a kernel's own order; shape, dtype and values are those of the plain one.

    A kernel reads `packed`. Everything else (indexing, arithmetic, copies from a checkpoint) sees
    the plain values: they are restored for the operation, and an operation that writes packs its
    result again. Subclasses say how to pack and how to restore; restoring is exact.
    """

    packed: Any
    """What the kernel reads; its type is the subclass's own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    _keeps_type: ClassVar[tuple[Callable[..., Any], ...]] = (
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    )

    @staticmethod
    def _wrap(cls: type[_Self], like: torch.Tensor) -> _Self:
        result: _Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        return result

    def dense(self) -> torch.Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to restore its values")

    def repack(self, values: torch.Tensor) -> None:
        """Replace the stored values by `values`, a plain tensor of this shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to pack values")

    def share(self: _Self) -> _Self:
        """Return another tensor object over the same stored values."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to share its values")

    def nbytes_packed(self) -> int:
        """Bytes that the stored form takes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it stores")

    def copy(self: _Self) -> _Self:
        """Return a packed tensor with values of its own."""
        result = self.share()
        result.repack(self.dense())
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        if id(self) not in memo:
            result = self.copy()
            if isinstance(self, torch.nn.Parameter):
                result = torch.nn.Parameter(result, self.requires_grad)  # type: ignore[assignment]
            memo[id(self)] = result
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls._keeps_type:
            return args[0].share()
        if func is torch.ops.aten.clone.default and not kwargs.get("memory_format"):
            return args[0].copy()
        written = _written_arguments(func)
        restored: dict[int, tuple[PackedTensor, torch.Tensor]] = {}

        def restore(value: Any) -> Any:
            if not isinstance(value, PackedTensor):
                return value
            if id(value) not in restored:
                restored[id(value)] = (value, value.dense())
            return restored[id(value)][1]

        plain_args, plain_kwargs = pytree.tree_map(restore, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        targets = [args[i] for i in written if i < len(args)]
        for target in targets:
            if isinstance(target, PackedTensor):
                target.repack(restored[id(target)][1])
        if len(targets) == 1 and isinstance(targets[0], PackedTensor):
            return targets[0]
        return result


def _written_arguments(func: Any) -> list[int]:
    """Positions of the arguments that an operator writes to, from its schema."""
    return [
        i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
