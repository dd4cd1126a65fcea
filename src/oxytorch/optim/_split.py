"""A float32 weight in two halves: what a split parameter is to who reads, writes and copies it.

A split parameter is bfloat16, the upper half of its weight, and the lower half stands beside it.
Layers compute with the upper half. To all others it is the float32 weight: who reads it outside of
the model's forward reads both halves, who writes it writes both, and its copies are plain float32.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from . import _sharding, formats

_as_plain = torch._C.DisableTorchFunctionSubclass


@contextmanager
def _plainly() -> Iterator[None]:
    """Tensors that are made inside have versions, and no gradients."""
    with torch.inference_mode(False), torch.no_grad(), _as_plain():
        yield


class Halves:
    """The halves of one weight.

    upper: bfloat16; shares memory and version with the parameter, of a sharded one with its shard.
    low: int16, placed as `upper`; zeros if None.

    Who writes both raises both versions by as much. Where only the upper half was written, what
    was written is the weight, and the lower half is zero.
    """

    def __init__(self, parameter: Tensor, low: Tensor | None = None) -> None:
        with _plainly():
            self.upper = Tensor.detach(_sharding.peek(parameter))
            self.low = torch.zeros_like(self.upper, dtype=torch.int16) if low is None else low
        self.address = self.upper.data_ptr()
        self.begin()
        # The weight as others hold it, and the versions at which it was what the halves are.
        self._shown: weakref.ref[Tensor] | None = None
        self._shown_version = self._shown_from = 0

    def begin(self) -> None:
        """Tells that the halves are those of one weight now."""
        self.lead = self.upper._version - self.low._version

    def is_written(self) -> bool:
        """Whether the upper half was written alone."""
        return self.upper._version - self.low._version != self.lead

    def settle(self) -> None:
        """Makes what was written to the upper half alone the weight."""
        if self.is_written():
            with _plainly():
                self.low.zero_()
            self.begin()

    def join(self) -> Tensor:
        """The float32 weight, a new tensor."""
        self.settle()
        with _plainly():
            return formats.join(self.upper, self.low)

    def set(self, weight: Tensor) -> None:
        """Makes the float32 tensor `weight` the weight, all bits of it."""
        with _plainly():
            upper, low = formats.split(weight)
            self.upper.copy_(upper)
            self.low.copy_(low)
        self.begin()

    def show(self) -> Tensor:
        """The float32 weight, the same tensor as long as anybody holds it.

        Writes to it reach the halves with `take`, and at the latest when nobody holds it any more.
        """
        shown = self._shown() if self._shown is not None else None
        if shown is None:
            shown = self.join()
            with _plainly():
                same = shown.detach()
            self._shown = weakref.ref(shown)
            weakref.finalize(shown, self._take, same).atexit = False
        elif not self._take(shown) and self.upper._version != self._shown_from:
            with _plainly():
                shown.copy_(self.join())
        self._note(shown)
        return shown

    def take(self) -> None:
        """Brings what was written to the tensor of `show` to the halves."""
        shown = self._shown() if self._shown is not None else None
        if shown is not None and self._take(shown):
            self._note(shown)

    def _take(self, shown: Tensor) -> bool:
        is_written = shown._version != self._shown_version
        if is_written:
            self.set(shown)
        return is_written

    def _note(self, shown: Tensor) -> None:
        self._shown_version, self._shown_from = shown._version, self.upper._version


class WatchedParameter(nn.Parameter):
    """A parameter whose version counts writes through `.data` too."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """A plain parameter: only one that exists becomes watched (`watch`, `split`)."""
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> Tensor:
        """The values, with the parameter's version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _set_memory(self, value)


class SplitParameter(WatchedParameter):
    """The upper half of a float32 weight, which is the whole weight to all but layers."""

    _halves: Halves

    @property
    def data(self) -> Tensor:
        """The float32 weight; who writes to it writes the weight. In a forward the upper half."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        if value.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"expected data of dtype torch.float32 for a split weight, got {value.dtype}; "
                "oxytorch.undo(model) makes weights plain float32, which convert to all dtypes"
            )
        weight = value._halves.join() if isinstance(value, SplitParameter) else value
        with _plainly():
            upper, low = formats.split(weight.detach().float())
            _set_memory(self, upper)
        self._halves = Halves(self, low)

    def detach(self) -> Tensor:
        """As `data`."""
        if is_upper_half():
            with _as_plain():
                return super().detach()
        return _shown(self._halves, self._halves.show())

    def set_(self, source: Tensor) -> Any:  # type: ignore[override]
        """Makes the values of `source` the weight."""
        self.data = source
        return self

    def share_memory_(self) -> Any:
        """Moves both halves to memory that processes share."""
        self._halves.low.share_memory_()  # type: ignore[no-untyped-call]
        with _as_plain():
            return super().share_memory_()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._halves.join(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self._halves.join(), self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(function, types, args, kwargs or {})


class ShownWeight(Tensor):
    """A split weight in float32, or a view of it: what is written to it becomes the weight."""

    _halves: Halves
    _whole: Tensor
    _plain: Tensor

    @property
    def data(self) -> Tensor:
        """The same values, not another count of writes to them."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _set_memory(self, value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(function, types, args, kwargs or {})


_sharding.PLAIN |= {WatchedParameter, SplitParameter, ShownWeight}


class _Place(threading.local):
    """computing: how many forwards of models run in this thread. saving: whether one is saved."""

    computing = 0
    saving = False


_place = _Place()


def is_upper_half() -> bool:
    """Whether a split parameter is nothing but its upper half here: in forwards and steps."""
    return (
        _place.computing > 0
        or not torch._C._is_torch_function_enabled()
        or torch.compiler.is_compiling()
    )


@contextmanager
def computing() -> Iterator[None]:
    """Split parameters are their upper halves inside, as layers use them."""
    _place.computing += 1
    try:
        yield
    finally:
        _place.computing -= 1


@contextmanager
def saving() -> Iterator[None]:
    """Split parameters say inside that they are float32, as they are saved."""
    before, _place.saving = _place.saving, True
    try:
        yield
    finally:
        _place.saving = before


_PROPERTY = ("__get__", "__set__", "__delete__")
_VIEWS = ("T", "mT", "H", "mH", "real")

_ASKS = frozenset(
    """
    size stride dim ndimension numel nelement element_size is_contiguous data_ptr dim_order
    storage_offset storage untyped_storage _typed_storage is_floating_point is_complex is_signed
    is_shared is_pinned is_inference is_set_to is_same_size get_device __len__ __hash__ __repr__
    requires_grad_ detach_ retain_grad register_hook register_post_accumulate_grad_hook backward
    """.split()  # noqa: SIM905
)
"""Methods that ask for the parameter itself and not for its values."""

_IN_PLACE = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
    """.split()  # noqa: SIM905
)
"""Functions that write to their first argument, beside those whose names end with `_`."""

_DETACHED = frozenset({"detach", "detach_", "numpy", "__array__", "tolist", "item", "__deepcopy__"})
"""What gives values without gradients."""


def _call(function: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch whose arguments hold split parameters or their weights."""
    name = getattr(function, "__name__", "")
    if name in _PROPERTY:
        attribute = getattr(function.__self__, "__name__", "")
        if attribute == "dtype" and _place.saving and isinstance(args[0], SplitParameter):
            return torch.float32
        is_plain = attribute not in _VIEWS
        writes = name == "__set__"
    else:
        # Operators themselves are called by programs that were compiled.
        is_operator = isinstance(function, torch._ops.OpOverload)
        is_plain = is_operator or name in _ASKS or torch.compiler.is_compiling()
        writes = name in _IN_PLACE or isinstance(kwargs.get("out"), SplitParameter)
        writes |= name.endswith("_") and not name.endswith("__")
    if not is_plain:
        joins = writes or not (_place.computing or _meets_narrow(args, kwargs))
        is_plain = not joins and ShownWeight not in types
    if is_plain:
        with _as_plain():
            return function(*args, **kwargs)
    if writes and torch.is_grad_enabled() and args and args[0].requires_grad:
        raise RuntimeError(
            f"{name}: expected torch.no_grad() around a write to a parameter that requires grad"
        )
    return _call_on_weights(function, name, args, kwargs, joins)


def _meets_narrow(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an argument beside split weights has 16 bits: then a layer computes with them."""
    return any(
        isinstance(value, Tensor)
        and not isinstance(value, SplitParameter | ShownWeight)
        and value.dtype in (torch.bfloat16, torch.float16)
        for value in _pytree.tree_leaves((args, kwargs))
    )


def _call_on_weights(
    function: Any, name: str, args: Any, kwargs: dict[str, Any], joins: bool
) -> Any:
    """Calls it on float32 weights; what it writes to them reaches the halves."""
    wholes: dict[int, tuple[Halves, Tensor]] = {}
    given: dict[int, Tensor] = {}

    def weight_of(value: Any) -> Any:
        if isinstance(value, ShownWeight):
            if value.requires_grad:  # a parameter was made from it
                return value
            halves, whole, values = value._halves, value._whole, value._plain
            halves.show()
        elif isinstance(value, SplitParameter) and joins:
            halves = value._halves
            whole = values = halves.show()
            if value.requires_grad and torch.is_grad_enabled() and name not in _DETACHED:
                joined: Tensor = _Join.apply(value, values)  # type: ignore[no-untyped-call]
                return joined
        else:
            return value
        wholes[whole.untyped_storage()._cdata] = (halves, whole)
        given[id(values)] = value
        return values

    def shown(value: Any) -> Any:
        if id(value) in given:
            return given[id(value)]
        if type(value) is Tensor and value.layout is torch.strided and not value.requires_grad:
            found = wholes.get(value.untyped_storage()._cdata)
            if found is not None:
                return _shown(*found, value)
        return value

    with _as_plain():
        new_args, new_kwargs = _pytree.tree_map(weight_of, (args, kwargs))
        result = function(*new_args, **new_kwargs)
        for halves, _ in wholes.values():
            halves.take()
        if name in ("numpy", "__array__"):
            # Nobody could see that it is written.
            result.flags.writeable = False
            return result
        return _pytree.tree_map(shown, result)


class _Join(torch.autograd.Function):
    """The float32 weight of a split parameter, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _shown(halves: Halves, whole: Tensor, values: Tensor | None = None) -> ShownWeight:
    """`values`, which share the memory of `whole`, the weight that `halves` shows."""
    values = whole if values is None else values
    with _plainly():
        shown = values.as_subclass(ShownWeight)
    shown._halves, shown._whole, shown._plain = halves, whole, values
    return shown


def _set_memory(parameter: Tensor, value: Tensor) -> None:
    # The property of a plain tensor, which the classes above hide.
    memory: Any = torch._C.TensorBase.data
    with _as_plain():
        memory.__set__(parameter, value)


def watch(parameter: Tensor) -> None:
    """Makes writes through `.data` count as writes, where the parameter is a plain one."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = WatchedParameter


def split(parameter: Any) -> None:
    """Makes a plain float32 parameter the upper half of its weight, in place."""
    with _plainly():
        upper, low = formats.split(parameter)
    _set_memory(parameter, upper)
    parameter.__class__ = SplitParameter
    parameter._halves = Halves(parameter, low)


def join(parameter: Any) -> None:
    """Makes a split parameter plain float32 again."""
    if type(parameter) is SplitParameter:
        weight = parameter._halves.join()
        del parameter._halves
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        _set_memory(parameter, weight)


class _Together:
    """Parameters that are split together, as soon as optimizers of ours hold them all."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [weakref.ref(own) for own in parameters]
        self._free = {id(own) for own in parameters}

    def hold(self, parameter: Tensor) -> None:
        self._free.discard(id(parameter))
        if not self._free:
            for own in (reference() for reference in self._parameters):
                if own is not None:
                    split(own)
                    _wishes.pop(own, None)


_wishes: Any = WeakIdKeyDictionary()
"""Plain parameters that are to be split once an optimizer holds them."""


def wish(parameters: Sequence[nn.Parameter]) -> None:
    """Lets float32 parameters be split, all together, when optimizers of ours hold them all."""
    together = _Together(parameters)
    for parameter in parameters:
        _wishes[parameter] = together


def withdraw(parameters: Iterable[Tensor]) -> None:
    """Ends a wish."""
    for parameter in parameters:
        _wishes.pop(parameter, None)


def hold(parameters: Iterable[Tensor]) -> None:
    """Tells that an optimizer of ours steps the parameters."""
    for parameter in parameters:
        together = _wishes.get(parameter)
        if together is not None:
            together.hold(parameter)
