"""Weights in the order that a kernel wants, which still are the weight that the user gave.

Taking values out, packing them again and what operators do to them change one cell under one lock,
so they are one file; what needs none of that is in cell, own_storage, operators and reordered.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from .cell import AliasPlace, Cell
from .fields import Fields
from .no_modes import DYNAMO, no_modes
from .operators import PlainArguments, uses_of
from .own_storage import is_aliased, is_same_memory, usable_anywhere
from .watched import is_parameter

_Self = TypeVar("_Self", bound="PackedTensor")
_aten = torch.ops.aten

_ALIASES = (_aten.detach.default, _aten.alias.default)


class _PackedMeta(torch._C._TensorMeta):
    """Lets the class of a packed parameter be called as nn.Parameter is: `type(p)(values,
    requires_grad=...)` makes a plain one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "requires_grad" in kwargs:
            return nn.Parameter(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class PackedTensor(Tensor, metaclass=_PackedMeta):
    """A tensor stored in a kernel's own order; shape, dtype and values are those of the plain one.

    It is the weight: what writes to it, under whatever name, changes what the next call uses.
    Operators that only read see the plain values, restored for them. What writes, and what returns
    an alias of the memory (a view, NumPy, an address), takes the plain values out: from then on
    they are the truth, and the packed form is not used. Once nobody holds an alias of them any
    more, `is_packed` packs them again. Subclasses say how to pack (`repack`) and how to restore
    (`restore`).
    """

    cell: Cell

    _is_handed_out = False  # to a user, by an operator, and not held by what runs the layer
    _place: AliasPlace | None = None  # of one that was handed out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _shared_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes of the tensor object that another one over the same weight has too."""

    _packs_in_place: ClassVar[bool] = True
    """Whether `repack` writes to memory that these attributes hold, and not the cell."""

    @staticmethod
    def _wrap(
        cls: type[_Self],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        cell: Cell | None = None,
    ) -> _Self:
        with torch.inference_mode(False):  # a weight's tensors count writes, wherever they are made
            result: _Self = torch.Tensor._make_wrapper_subclass(
                cls,
                tuple(shape),
                dtype=dtype,
                device=torch.device(device),
                requires_grad=False,
                storage_size=0,
            )
        # Code of torch's that asks for its own memory would read from address 0.
        torch._C._set_throw_on_mutable_data_ptr(result)
        result.cell = Cell() if cell is None else cell
        return result

    def repack(self, values: Tensor) -> None:
        """Replace the stored values by `values`, a plain floating tensor of this shape."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to pack values")

    def restore(self) -> Tensor:
        """Return the plain values that the packed form stands for, a new contiguous tensor."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to restore its values")

    def nbytes_packed(self) -> int:
        """Bytes that the stored form takes."""
        raise NotImplementedError(f"{type(self).__name__} does not say how much memory it takes")

    def why_not_packed(self) -> str | None:
        """Return why values of this shape and dtype cannot be packed, or None if they can."""
        return None

    def is_packed(self) -> bool:
        """Whether the packed form is the weight; packs again first where that is possible."""
        self._follow()
        cell = self.cell
        are_relatives_packed = cell.relatives is None or self._settle_relatives()
        return (not cell.is_out or self._pack_again()) and are_relatives_packed

    def dense(self) -> Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        self.is_packed()  # rounded to the format after a write
        return self.values().clone() if self.cell.plain is not None else self.values()

    def values(self) -> Tensor:
        """Return the plain values; a write to them is not seen."""
        self._follow()
        plain = self.cell.plain
        if plain is None or not self.cell.is_out:
            self._sync_relatives()
        return self._restored() if plain is None else _apart(plain)

    def plain(self) -> Tensor:
        """Return the plain values as a tensor that may be written to, which takes them out."""
        self._prepare_to_take_out()
        with self.cell.lock:  # no call may pack again before somebody else holds the memory too
            return _apart(self._taken_out())

    def pin(self) -> Tensor:
        """Take the plain values out for good and return them."""
        self._prepare_to_take_out()
        with self.cell.lock:
            plain = self._taken_out()
            self.cell.is_pinned = True
            return plain

    def _restored(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), no_modes():
            return self.restore().detach()  # a view would hold what it is a view of

    def _follow(self) -> None:
        """Look at the values that this one was left with, where the weight was assigned to."""
        if self._place is not None and self._place.cell is not None:
            self.cell, self._place.cell = self._place.cell, None

    def _prepare_to_take_out(self) -> None:
        self._follow()
        if not self.cell.is_out:
            self._sync_relatives()  # which takes their locks, not behind this one's

    def _taken_out(self) -> Tensor:
        cell = self.cell
        with cell.lock:
            if cell.plain is None:
                cell.plain = self._restored()
            if not cell.is_out:
                cell.is_out = True
                if cell.relatives is not None:
                    cell.relatives.append(self.share())
                cell.tick()
            return cell.plain

    def _pack_again(self) -> bool:
        cell = self.cell
        with cell.lock:
            if not cell.is_out:
                return True
            if cell.is_pinned or cell.plain is None or self.why_not_packed() is not None:
                return False
            if type(cell.plain) is not Tensor or cell.plain.device.type != "cpu":
                return False
            if is_aliased(cell.plain):
                return False
            with torch.inference_mode(False), torch.no_grad(), no_modes():
                self.repack(cell.plain)
            if not cell.keeps_plain:
                cell.plain = None
            cell.is_out = False
            if cell.relatives is not None:
                cell.relatives[:] = [other for other in cell.relatives if other.cell is not cell]
            cell.tick()
            return True

    def relate(self, other: PackedTensor) -> None:
        """Tell that the packed form of `other` is over memory of this one's."""
        if self.cell.relatives is None:
            self.cell.relatives = []
        other.cell.relatives = self.cell.relatives
        for cell in (self.cell, other.cell):  # a call depends on more than its own weight
            cell.tick()

    def _sync_relatives(self) -> None:
        """Bring the values of relatives to the memory; they stay out for the calls after this."""
        for other in list(self.cell.relatives or ()):
            if other.cell is not self.cell and other.why_not_packed() is None:
                other.sync()

    def _settle_relatives(self) -> bool:
        """Bring the values of relatives to the memory; whether they all are packed again."""
        are_packed = True
        for other in list(self.cell.relatives or ()):  # packing again takes it from the list
            if other.cell is not self.cell and not other._pack_again():
                if other.why_not_packed() is None:
                    other.sync()
                are_packed = False
        return are_packed

    def share(self: _Self) -> _Self:
        """Return another tensor object over the same weight."""
        self._follow()
        result = PackedTensor._wrap(type(self), self.shape, self.dtype, self.device, self.cell)
        for name in self._shared_fields:
            setattr(result, name, getattr(self, name))
        return result

    def _around(self: _Self, values: Tensor) -> _Self:
        """Return a tensor of this kind whose values are out: `values` themselves, not a copy."""
        return packed_around(type(self), values, self.fields())

    def _own_names(self) -> tuple[str, ...]:
        """The attributes that are the weight's, and not a user's."""
        return ("cell", "_is_param", "_is_handed_out", "_place", *self._shared_fields)

    def fields(self) -> dict[str, Any]:
        """What another tensor over the same weight has too, besides the cell."""
        return {name: getattr(self, name) for name in self._shared_fields}

    def sync(self) -> None:
        """Bring the packed form up to date, for those that read it while the values are out."""
        with self.cell.lock:
            if self.cell.is_out:
                with torch.inference_mode(False), torch.no_grad(), no_modes():
                    self.repack(self.cell.plain)  # type: ignore[arg-type]

    def copy(self: _Self) -> _Self:
        """Return a packed tensor with values of its own."""
        return self._around(self.values().clone())

    def as_parameter(self: _Self, requires_grad: bool) -> nn.Parameter:
        """Return nn.Parameter(self, requires_grad) without the operator that it calls.

        A process's first operator on a tensor subclass has torch import its distributed tensors,
        which takes the better part of a second.
        """
        result: Any = self.share()
        result.requires_grad_(requires_grad)
        result._is_param = True
        return result  # type: ignore[no-any-return]

    # What shows the memory to somebody whom no operator tells of.

    @property
    def data(self) -> Any:
        """The plain values, which are the weight while somebody holds them; assigning replaces
        the weight."""
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(_data_of, (), self)
        return self.plain()

    @data.setter
    def data(self: _Self, values: Tensor) -> None:
        if values is self:
            return
        if not isinstance(values, PackedTensor):
            values = usable_anywhere(values)
        other = values if isinstance(values, PackedTensor) else self._around(values)
        if self._packs_in_place and type(other) is type(self) and other is not values:
            self.let_aliases_go()
            self._take_over(other)
        if type(other) is not type(self):
            self.__class__ = type(other)  # type: ignore[assignment]
        with torch.inference_mode(False), no_modes():  # which would make `like` one of its own
            like = PackedTensor._wrap(type(self), other.shape, other.dtype, other.device)
            Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        for name in self._shared_fields:
            setattr(self, name, getattr(other, name))
        cell, self.cell = self.cell, other.cell
        cell.tick()  # what watches the cell that was replaced has to look again

    def is_held_by_others(self) -> bool:
        """Whether others hold tensors over this weight's memory, or may hold them."""
        cell = self.cell
        with cell.lock:
            is_out = cell.is_pinned or (cell.plain is not None and is_aliased(cell.plain))
        return is_out or any(place is not self._place for place in [*cell.aliases])

    def let_aliases_go(self, plain: Tensor | None = None) -> None:
        """Let tensors that users hold over this weight be views of `plain`, for good.

        plain: values of this shape and dtype; None: those that the weight has now, in memory that
            is theirs alone.
        """
        held = [place for place in [*self.cell.aliases] if place is not self._place]
        if held:
            apart = Cell(self.values() if plain is None else plain)
            apart.is_pinned = True
            for place in held:
                place.cell = apart
                self.cell.aliases.discard(place)

    def _take_over(self, other: PackedTensor) -> None:
        """Let `other`, whose values are out, be what writes to this weight's packed form."""
        cell, new = self.cell, other.cell
        if other.shape == self.shape and other.dtype == self.dtype:
            # What else reads the packed form, such as a product, shares this cell.
            with cell.lock:
                cell.plain, cell.is_out, cell.is_pinned = new.plain, True, False
            other.cell = cell
        else:
            cell.plain, cell.is_out, new.relatives = None, False, cell.relatives
        if cell.relatives is not None:
            cell.relatives[:] = [each for each in cell.relatives if each.cell is not cell]
            cell.relatives.append(other)

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and torch.is_grad_enabled() and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return self.plain().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        plain: Any = self.plain()
        return plain.__array__() if dtype is None else plain.__array__(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.plain().__dlpack__(**kwargs)

    def tolist(self) -> Any:
        return self.values().tolist()

    def apply_(self: _Self, callable: Any) -> _Self:
        return self._written_by("apply_", callable)

    def map_(self: _Self, tensor: Tensor, callable: Any) -> _Self:
        return self._written_by("map_", tensor.clone(), callable)

    def _written_by(self: _Self, name: str, *given: Any) -> _Self:
        """What a method that knows no dispatch makes of the plain values becomes the weight."""
        if self.requires_grad:
            raise RuntimeError(
                f"Can't call {name}() on Variable that requires grad. "
                f"Use var.detach().{name}() instead."
            )
        self.copy_(getattr(self.dense(), name)(*given))
        return self

    def data_ptr(self) -> int:
        return self.pin().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        # Who makes a fake tensor of this one asks for its own memory, apart from the values': none,
        # though a trace may have given it theirs.
        if sys._getframe(1).f_globals.get("__name__") == "torch._subclasses.meta_utils":
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        return self.plain().untyped_storage()

    def share_memory_(self: _Self) -> _Self:
        self.pin().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        plain = self.cell.plain
        return plain is not None and bool(plain.is_shared())  # type: ignore[no-untyped-call]

    def expose(self) -> None:
        """Give this object memory that holds the plain values, for code below Python."""
        exposed = torch.Tensor._make_subclass(type(self), self.pin())
        Tensor.data.__set__(self, exposed)  # type: ignore[attr-defined]

    @property
    def _plain_values(self) -> Tensor:
        return self.pin()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_plain_values"], Fields(type(self), self.fields())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Fields, size: Any, stride: Any
    ) -> PackedTensor:
        kind: type[PackedTensor] = context.kind  # type: ignore[assignment]
        result = packed_around(kind, inner["_plain_values"], context.values)
        result.cell.is_pinned = True
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if isinstance(self, nn.Parameter):
            return repr(nn.Parameter(self.values(), self.requires_grad))
        return repr(self.values())

    def __copy__(self) -> Tensor:
        alias = self.detach()
        return nn.Parameter(alias, self.requires_grad) if isinstance(self, nn.Parameter) else alias

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        if id(self) not in memo:
            key = id(self.cell)
            if key not in memo:
                memo[key] = self._deep_copy(memo)
            result: Any = memo[key].share()
            if isinstance(self, nn.Parameter):
                result = result.as_parameter(self.requires_grad)
            if self.grad is not None:
                result.grad = self.grad.clone()
            memo[id(self)] = result
        return memo[id(self)]  # type: ignore[no-any-return]

    def _deep_copy(self: _Self, memo: dict[int, Any]) -> _Self:
        """Return a copy for `copy.deepcopy`: those of weights over one memory share theirs too."""
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file holds the plain values, so that it can be read without this package.
        # A process that is being started takes over memory, which has to live on.
        lives_on = self.cell.is_pinned or get_spawning_popen() is not None
        plain = self.plain() if lives_on else self.values()
        if not isinstance(self, nn.Parameter):
            if self._is_handed_out:
                return Tensor.__reduce_ex__(plain, protocol)  # type: ignore[no-untyped-call]
            return packed_around, (type(self), plain, self.fields())
        own = {name: value for name, value in vars(self).items() if name not in self._own_names()}
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if own:
            rebuild = torch._utils._rebuild_parameter_with_state
            return rebuild, (plain, self.requires_grad, hooks, own)
        return torch._utils._rebuild_parameter, (plain, self.requires_grad, hooks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if DYNAMO in sys.modules:
            _leave_alone()
        if func in _ALIASES and isinstance(args[0], PackedTensor):
            alias = args[0].share()
            alias._is_handed_out = True
            alias._place = AliasPlace()
            alias.cell.aliases.add(alias._place)
            return alias
        if func is _aten.clone.default and cls.copy is not PackedTensor.copy:
            return args[0].copy()  # of codes, which are more than the values
        uses = uses_of(func)
        if uses.may_return_it:
            return func.decompose(*args, **kwargs)
        if uses.is_simple and not kwargs:
            given_plain = zip(args, uses.takes_out, strict=False)
            return func(
                *[
                    (a.plain() if out else a.values()) if isinstance(a, PackedTensor) else a
                    for a, out in given_plain
                ]
            )
        given = PlainArguments(PackedTensor, uses, args, kwargs)
        return given.returned(func(*given.args, **given.kwargs))

    def as_subclass(self, cls: Any) -> Any:
        return self.plain().as_subclass(cls)

    def became(self, plain: Tensor) -> None:
        """An alias of the weight is another view of its memory from now on, or of other memory."""
        like = packed_around(type(self), plain, self.fields())
        like.cell.is_pinned = True
        Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        self.cell = like.cell

    def was_written(self, plain: Tensor) -> None:
        if plain.shape != self.shape:
            raise RuntimeError(
                f"{type(self).__name__}: expected an operator that keeps the shape "
                f"{list(self.shape)}, got {list(plain.shape)}; assign to `.data` instead"
            )
        former = self.cell.plain
        if former is None or not is_same_memory(former, plain):
            self.cell.plain = plain  # `set_` gives other memory
        else:  # others may count writes to it, of which an operator below autograd tells nobody
            torch.autograd.graph.increment_version(former)
        self.cell.tick()


def _data_of(weight: PackedTensor) -> Tensor:
    """The function that modes see where code asks for a weight's `data`."""
    return weight.plain()


def why_not_plain(weight: object) -> str | None:
    """Return why a module's weight cannot be packed, whatever the format, or None if it can."""
    if weight is None:
        return "its weight is recomputed at each call (a parametrization)"
    if not is_parameter(weight):
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    if weight.numel() == 0:
        return "its weight is empty"
    return None


def _apart(plain: Tensor) -> Tensor:
    """Another tensor object over the same values; those of a compiler's tensor are for it alone."""
    return plain.detach() if type(plain) is Tensor else plain


@functools.cache
def _leave_alone() -> None:
    """Tell the compiler not to compile these files: it would, of a layer not compiled whole."""
    used = (Cell, Fields, no_modes, PlainArguments, is_aliased)
    for name in (__name__, *(own.__module__ for own in used), f"{__package__}.reordered"):
        sys.modules[DYNAMO].add(name)


def packed_around(cls: type[_Self], values: Tensor, fields: dict[str, Any]) -> _Self:
    """Return a packed tensor whose plain values are out: `values` themselves, packed when used."""
    cell = Cell(values.detach())
    result = PackedTensor._wrap(cls, values.shape, values.dtype, values.device, cell)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def packed_later(
    cls: type[PackedTensor], weight: nn.Parameter, fields: dict[str, Any]
) -> nn.Parameter:
    """Return a parameter over the memory of a plain one that is packed at its next use."""
    return packed_around(cls, weight.detach(), fields).as_parameter(weight.requires_grad)
