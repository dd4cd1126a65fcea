"""Weights in the order that a kernel wants, which still look like the tensor that the user gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree as pytree

_Self = TypeVar("_Self", bound="PackedTensor")

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class PackedTensor(torch.Tensor):
    """A tensor stored in a kernel's own order; shape, dtype and values are those of the plain one.

    A kernel reads `packed`. Everything else (indexing, arithmetic, copies from a checkpoint) sees
    the plain values: they are restored for the operation, and an operation that writes packs its
    result again. Subclasses say how to pack and how to restore.

    scale: a factor per output channel, float32 [out_channels] (a folded normalization). The stored
    values are then values * scale, and restoring stays exact: one byte an element keeps by how
    many units in the last place the division misses the user's value.
    """

    packed: Any
    """What the kernel reads; its type is the subclass's own."""
    scale: torch.Tensor | None = None
    _correction: torch.Tensor | None = None
    _kept: torch.Tensor | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _keeps_type: ClassVar[tuple[Callable[..., Any], ...]] = (
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    )
    _shared_fields: ClassVar[tuple[str, ...]] = ("packed", "scale", "_correction", "_kept")

    @staticmethod
    def _wrap(cls: type[_Self], like: torch.Tensor, dtype: torch.dtype | None = None) -> _Self:
        result: _Self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=like.device, requires_grad=False
        )
        return result

    def _pack(self, stored: torch.Tensor) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to pack values")

    def _unpack(self) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how to restore its values")

    @property
    def keeps_plain(self) -> bool:
        """Whether the values could not be restored exactly and are kept beside the packed ones."""
        return self._kept is not None

    def nbytes_packed(self) -> int:
        """Bytes that the stored form takes."""
        extra = [t for t in (self._correction, self._kept, self.scale) if t is not None]
        return int(torch.ops.mkldnn._nbytes.default(self.packed)) + sum(t.nbytes for t in extra)

    def repack(self, values: torch.Tensor) -> None:
        """Replace the stored values by `values`, a plain floating tensor of this shape."""
        values = values.detach()
        if self.scale is None:
            self.packed = self._pack(values.to(self.dtype).contiguous())
            return
        stored = (values.float() * self._column(self.scale)).to(self.dtype).contiguous()
        self.packed = self._pack(stored)
        values = values.to(self.dtype)
        missed = self._divided(stored)
        bits = _BITS[self.dtype]
        steps = values.contiguous().view(bits).int() - missed.view(bits).int()
        steps = torch.where(values == missed, 0, steps)
        if bool((steps.abs() <= 127).all()) and bool(missed.isfinite().all()):
            self._correction, self._kept = steps.to(torch.int8), None
        else:
            self._correction, self._kept = None, values.clone()

    def dense(self) -> torch.Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        if self._kept is not None:
            return self._kept.clone()
        stored = self._unpack()
        if self._correction is None:
            return stored
        bits = _BITS[self.dtype]
        return (self._divided(stored).view(bits) + self._correction).view(self.dtype)

    def share(self: _Self) -> _Self:
        """Return another tensor object over the same stored values."""
        result = PackedTensor._wrap(type(self), self)
        for name in self._shared_fields:
            setattr(result, name, getattr(self, name))
        return result

    def copy(self: _Self) -> _Self:
        """Return a packed tensor with stored values of its own."""
        result = self.share()
        result.repack(self.dense())
        return result

    def as_parameter(self: _Self, requires_grad: bool) -> torch.nn.Parameter:
        """Return nn.Parameter(self, requires_grad) without the operator that it calls.

        A process's first operator on a tensor subclass has torch import its distributed tensors,
        which takes the better part of a second.
        """
        result: Any = self.share()
        result.requires_grad_(requires_grad)
        result._is_param = True
        return result  # type: ignore[no-any-return]

    def _column(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1, *[1] * (self.dim() - 1))

    def _divided(self, stored: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        return (stored.float() / self._column(self.scale)).to(self.dtype).contiguous()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        if id(self) not in memo:
            result = self.copy()
            if isinstance(self, torch.nn.Parameter):
                result = torch.nn.Parameter(result, self.requires_grad)
            memo[id(self)] = result
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        fields = {
            name: getattr(self, name)
            for name in self._shared_fields
            if name not in ("packed", "_correction", "_kept")
        }
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (type(self), self.dense(), fields, is_parameter, self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
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
        restored: dict[int, torch.Tensor] = {}

        def restore(value: Any) -> Any:
            if not isinstance(value, PackedTensor):
                return value
            if id(value) not in restored:
                restored[id(value)] = value.dense()
            return restored[id(value)]

        plain_args, plain_kwargs = pytree.tree_map(restore, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        written = [args[i] for i in _written_arguments(func) if i < len(args)]
        for target in written:
            if isinstance(target, PackedTensor):
                target.repack(restored[id(target)])
        if len(written) == 1 and isinstance(written[0], PackedTensor):
            return written[0]
        return result


def why_not_plain(weight: object) -> str | None:
    """Return why a module's weight cannot be packed, whatever the format, or None if it can."""
    if weight is None:
        return "its weight is made anew at each call (a parametrization)"
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    if weight.numel() == 0:
        return "its weight is empty"
    return None


def _rebuild(
    cls: type[PackedTensor],
    values: torch.Tensor,
    fields: dict[str, Any],
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    result = PackedTensor._wrap(cls, values)
    for name, value in fields.items():
        setattr(result, name, value)
    result.repack(values)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result


def _written_arguments(func: Any) -> list[int]:
    """Positions of the arguments that an operator writes to, from its schema."""
    return [
        i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
