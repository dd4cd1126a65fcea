"""A float32 weight in two parts: what code sees that reads, writes or copies a split parameter.

A split parameter is bfloat16, the upper half of its weight (rounded to nearest), and the low bits
stand beside it.
Layers compute with the upper half. To all other code it is the float32 weight: what reads it
outside of the model's forward reads both parts, what writes it writes both, and its copies are
plain float32.

The classes, the choice of what a function is given, and a call on whole weights (`_Call`) ask for
one another's types and so are one file; what needs none of that is in split_views, split_functions,
split_contexts and split_storage.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..core.gradients import give_gradient
from ..core.modes import is_transformed
from ..core.watched import WatchedParameter, asks, set_memory
from ..ops.optimizer_step import formats
from . import sharding, split_functions, split_storage, split_views
from .compiler import never_compiled_alone
from .leaves import leaves, mapped
from .master_weight import MasterWeight, as_plain, plainly
from .split_contexts import (
    is_computing,
    is_in_own_code,
    is_saving,
    is_upper_half,
    is_whole_alone,
)
from .split_views import Join, UpperHalf


class SplitParameter(WatchedParameter):
    """The upper half of a float32 weight, which is the whole weight to all but layers."""

    _master: MasterWeight

    __repr__ = nn.Parameter.__repr__  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The float32 weight; who writes to it writes the weight. In a forward the upper half."""
        if is_in_own_code():
            own: Tensor = _moved(Tensor.data.__get__, (self,), {})  # type: ignore[attr-defined]
            return own  # with another count of writes, as torch's
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self or (isinstance(value, ShownWeight) and self._take_back(value)):
            return
        if isinstance(value, UpperHalf):
            if split_views.is_whole(value, self):
                return  # as `p.data += x` ends, for one
            value = split_views.values_of(value)
        if value.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"expected data of dtype torch.float32 for a split weight, got {value.dtype}; "
                "oxytorch.undo(model) makes weights plain float32, which convert to all dtypes"
            )
        weight = value._master.join() if isinstance(value, SplitParameter) else value
        with plainly():
            upper, low_bits = formats.split(weight.detach().float())
            self._master.leave()
            set_memory(self, upper)
        self._master = MasterWeight(self, low_bits)

    def _take_back(self, value: ShownWeight) -> bool:
        """Whether `value` is a whole weight of nobody else, which becomes this one's."""
        if value.requires_grad or not value._is_whole():
            return False
        master = value._master
        if master is not self._master:
            if not master.is_free:
                return False
            master.show()
            self._master.leave()
            with plainly():
                set_memory(self, master.upper)
            master.enter(self)
            self._master = master
        return True

    def detach(self) -> Tensor:
        """As `data`."""
        if is_in_own_code():
            detached: Tensor = _moved(Tensor.detach, (self,), {})
            return detached
        if is_upper_half():
            with as_plain():
                return super().detach()
        if asks(nn.Parameter.__new__, sys._getframe(1)):
            raise TypeError(
                "Parameter: expected a tensor, got a split weight; pass p.detach().clone()"
            )
        return _shown(self._master, self._master.show())

    def set_(self, source: Tensor) -> Any:  # type: ignore[override]
        """Makes the values of `source` the weight."""
        self.data = source
        return self

    def share_memory_(self) -> Any:
        """Moves both parts to memory that processes share."""
        self._master.low_bits.share_memory_()  # type: ignore[no-untyped-call]
        with as_plain():
            super().share_memory_()  # type: ignore[no-untyped-call]
        self._master.address = self._master.upper.data_ptr()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._master.join(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self._master.join(), self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(function, types, args, kwargs or {})


class ShownWeight(Tensor):
    """A split weight in float32, or a view of it: what is written to it becomes the weight."""

    _master: MasterWeight
    _whole: Tensor
    _plain: Tensor

    @property
    def data(self) -> Tensor:
        """The same values, not another count of writes to them."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse("data", (self,))
        set_memory(self, value)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: who stands for the weight keeps its memory."""
        _refuse("set_", (self,))
        return super().set_(*args, **kwargs)

    def _is_whole(self) -> bool:
        """Whether it has all values of the weight, in their order."""
        own, whole = self._plain, self._whole
        return own.shape == whole.shape and own.stride() == whole.stride()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(function, types, args, kwargs or {})


sharding.PLAIN |= {WatchedParameter, SplitParameter, ShownWeight}

_PARTS = (SplitParameter, ShownWeight, UpperHalf)


def _is_narrow(value: Any) -> bool:
    """Whether it is a tensor of 16 bits and no split weight."""
    return not isinstance(value, _PARTS) and split_views.has_16_bits(value)


@never_compiled_alone
def _call(function: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch whose arguments hold split parameters or their weights."""
    name = getattr(function, "__name__", "")
    if name in split_functions.PROPERTY:
        attribute = getattr(function.__self__, "__name__", "")
        if isinstance(args[0], SplitParameter) and not torch.compiler.is_compiling():
            if attribute == "dtype":
                _refuse_parametrization()
                if is_saving():
                    return torch.float32
            elif attribute == "grad" and name == "__set__":
                return _set_gradient(*args)
        if attribute not in split_functions.VIEWS:
            return _call_plainly(function, args, kwargs)
        if name == "__get__" and is_in_own_code():
            return _moved(function, args, kwargs)
        return _call_on_values(function, name, types, args, kwargs, writes=name == "__set__")
    # Operators themselves are called by programs that were compiled.
    is_operator = isinstance(function, torch._ops.OpOverload)
    if is_operator or name in split_functions.ASKS or torch.compiler.is_compiling():
        return _call_plainly(function, args, kwargs)
    if split_functions.asks_for_node(name, args):
        return _call_plainly(function, args, kwargs)
    if split_functions.is_collective(function):
        return _Call(name, joins=True, writes=False).run_collective(function, args, kwargs)
    if name in split_functions.REFUSED:
        _refuse(name, args)
    if name in split_functions.STORAGES and not is_upper_half():
        return split_storage.guarded(_call_plainly(function, args, kwargs))
    if name in split_functions.FUSED_STEPS and any(map(_is_narrow, leaves(args[2:]))):
        raise TypeError(
            f"{name}: expected states of float32 beside split weights, got 16 bits, in which torch "
            "makes them like the gradients; give the optimizer to oxytorch.optimize too"
        )
    writes = split_functions.writes_first(name) or _has_weight(kwargs.get("out"))
    writes |= kwargs.get("inplace") is True
    return _call_on_values(function, name, types, args, kwargs, writes)


def _call_plainly(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the upper halves."""
    # Torch's compiler would come back here under a function mode (a default device's).
    is_compiling = torch.compiler.is_compiling()
    with torch._C.DisableTorchFunction() if is_compiling else as_plain():
        return function(*args, **kwargs)


def _call_on_values(
    function: Any, name: str, types: Any, args: Any, kwargs: dict[str, Any], writes: bool
) -> Any:
    """On whole weights or, beside what layers compute with, on the upper halves."""
    if name in split_functions.LOOKS_UP and (is_computing() or UpperHalf in types):
        args, kwargs = _renormalized(name, args, kwargs)
        if ShownWeight not in types and (found := _looked_up(function, args, kwargs)) is not None:
            return found
    if writes and UpperHalf in types and split_views.is_written(args, kwargs):
        return split_views.write(function, args, kwargs)
    if is_computing() or UpperHalf in types:
        joins = writes or _meets_float32(name, args, kwargs)
        if not joins and (UpperHalf in types or is_in_own_code()):
            if name in split_functions.MOVES and _is_first_alone(args, kwargs):
                return _moved(function, args, kwargs)
            joins = is_whole_alone() and not _computes_in_16_bits(name, args, kwargs)
    else:
        joins = writes or not _is_of_layer(name, args, kwargs)
    if not joins and ShownWeight not in types:
        return _call_plainly(function, args, kwargs)
    return _Call(name, joins, writes).run(function, args, kwargs)


def _looked_up(function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """What a look-up gives whose gradients are summed in float32; None where it is another one."""
    if function is nn.functional.embedding:
        return split_views.looked_up(*args, **kwargs)
    if function is nn.functional.embedding_bag and not is_transformed():
        return split_views.bags_of(*args, **kwargs)
    return None


def _is_first_alone(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the first argument is the only split weight."""
    is_first = bool(args) and isinstance(args[0], SplitParameter | UpperHalf)
    return is_first and not _has_weight((args[1:], kwargs))


def _moved(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function that moves elements makes of its first argument, a split weight."""
    first = args[0]
    if isinstance(first, UpperHalf):
        return split_views.moved(function, first, first.low_bits, args[1:], kwargs)
    first._master.settle()
    return split_views.moved(function, first, first._master.low_bits, args[1:], kwargs)


def _computes_in_16_bits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function in the author's code computes with upper halves: products and tables, and
    what is given another tensor of 16 bits and does not promote it, as under autocast."""
    if name in split_functions.ONE_DTYPE or name in split_functions.LOOKS_UP:
        return True
    if name in split_functions.PROMOTES:
        return False
    return any(map(_is_narrow, leaves((args, kwargs))))


def _renormalized(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a look-up without `max_norm`, once its rows have no larger norms.

    Torch would write to the upper half alone.
    """
    most = kwargs.get("max_norm", args[3] if len(args) > 3 else None)
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    if most is None or not isinstance(weight, SplitParameter):
        return args, kwargs
    ids: Any = kwargs.get("input", args[0] if args else None)
    kind = kwargs.get("norm_type", args[4] if len(args) > 4 else 2.0)
    with torch.no_grad():
        call = _Call(name, joins=True, writes=True)
        call.run(torch.embedding_renorm_, (weight, ids.detach().reshape(-1), most, kind), {})
    if len(args) > 3:
        return (*args[:3], None, *args[4:]), kwargs
    return args, {**kwargs, "max_norm": None}


def _has_weight(value: Any) -> bool:
    return any(isinstance(own, _PARTS) for own in leaves(value))


def _is_of_layer(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an argument beside split weights has 16 bits: then a layer computes with them.

    Functions that torch computes in float32 then, as sums and products of elements, do so here; of
    what only moves elements, such an argument gives the shape.
    """
    if name in split_functions.PROMOTES or name in split_functions.MOVES:
        return False
    return any(map(_is_narrow, leaves((args, kwargs))))


def _meets_float32(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function that takes one dtype only is given a float32 tensor in a forward.

    So are weights that an author multiplies inputs with; layers of torch are given bfloat16.
    """
    return name in split_functions.BESIDE_FLOAT32 and any(
        type(value) is Tensor and value.dtype == torch.float32
        for value in (*args, *kwargs.values())
    )


def _refuse(name: str, args: Any) -> None:
    if args and isinstance(args[0], SplitParameter | ShownWeight) and _has_master(args[0]):
        raise TypeError(f"{name}: expected no split weight; {split_functions.REFUSED[name]}")


def _refuse_parametrization() -> None:
    """Tells torch.nn.utils.parametrize, which asks for the dtype before it changes anything."""
    if asks(ParametrizationList.__init__, sys._getframe(3)):
        raise TypeError(
            "register_parametrization: expected a layer without split weights; register "
            "parametrizations (weight_norm, spectral_norm, orthogonal) before oxytorch.optimize, "
            "or call oxytorch.undo(model), register them, and optimize again"
        )


def _set_gradient(parameter: Any, gradient: Any) -> None:
    """Sets `grad`; a float32 gradient, as the weight is float32, stays one."""
    with as_plain():
        if isinstance(gradient, Tensor) and gradient.dtype == torch.float32:
            parameter.grad_dtype = None
        parameter.grad = gradient


class _Call:
    """A call on float32 weights; what it writes to them reaches the parameters.

    joins: whether split parameters become whole weights.
    writes: whether the function writes to its first argument or `out`.
    """

    def __init__(self, name: str, joins: bool, writes: bool) -> None:
        self._name = name
        self._joins = joins
        self._writes = writes
        self._wholes: dict[int, tuple[MasterWeight, Tensor]] = {}
        self._given: dict[int, Tensor] = {}
        self._joined: list[tuple[SplitParameter, Tensor, Any]] = []

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with as_plain():
            new_args, new_kwargs = mapped(self._weight_of, (args, kwargs))
            if args and (self._writes or self._name in split_functions.SAME_DTYPES):
                new_args = (new_args[0], *self._of_same_dtypes(args[0], new_args[1:]))
            result = function(*new_args, **new_kwargs)
            if self._name in split_functions.UNCOUNTED:
                torch.autograd.graph.increment_version(new_args[0])
            self._take()
            if self._name in split_functions.ARRAYS:
                result.flags.writeable = False
                return result
            return mapped(self._shown, result)

    def run_collective(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The same of torch.distributed; what it starts is done when this returns."""
        with plainly():
            new_args, new_kwargs = mapped(self._weight_of, (args, kwargs))
            result = function(*new_args, **new_kwargs)
            if hasattr(result, "wait"):
                result.wait()
            torch.autograd.graph.increment_version([whole for _, whole in self._wholes.values()])
            self._take()
            return result

    def _weight_of(self, value: Any) -> Any:
        """The float32 values of an argument."""
        if isinstance(value, ShownWeight):
            if not _has_master(value):
                return value
            master, whole, values = value._master, value._whole, value._plain
            master.show()
        elif isinstance(value, UpperHalf):
            return split_views.values_of(value) if self._joins else value
        elif isinstance(value, SplitParameter) and self._joins:
            master = value._master
            whole = values = master.show()
            if (
                value.requires_grad
                and torch.is_grad_enabled()
                and self._name not in split_functions.DETACHED
            ):
                joined: Tensor = Join.apply(value, values)  # type: ignore[no-untyped-call]
                self._joined.append((value, joined, joined.grad_fn))
                return joined
        else:
            return value
        if self._name in split_functions.ARRAYS:
            # Nobody could see that their memory is written.
            return values.clone()
        self._wholes[whole.untyped_storage()._cdata] = (master, whole)
        self._given[id(values)] = value
        return values

    def _of_same_dtypes(self, first: Any, others: Any) -> Any:
        """The arguments after the first, a weight's gradients of 16 bits as float32."""
        targets = [own for own in leaves(first) if isinstance(own, Tensor)]
        if any(isinstance(own, SplitParameter | ShownWeight) for own in targets):
            return mapped(lambda own: own.float() if _is_narrow(own) else own, others)
        if self._name in split_functions.SAME_DTYPES and targets and all(map(_is_narrow, targets)):
            dtype = targets[0].dtype

            def rounded(own: Any) -> Any:
                is_whole = isinstance(own, Tensor) and own.dtype == torch.float32
                return own.to(dtype) if is_whole else own

            return mapped(rounded, others)
        return others

    def _take(self) -> None:
        """Brings what was written to the parameters."""
        for master, _ in self._wholes.values():
            master.take()
        for parameter, joined, node in self._joined:
            if joined._version:
                if joined.grad_fn is not node:
                    raise RuntimeError(
                        f"{self._name}: expected torch.no_grad() around a write to a parameter "
                        "that requires grad"
                    )
                # The function itself wrote without gradients, as those of torch.nn.init do.
                parameter._master.set(joined.detach())
                self._given[id(joined)] = parameter

    def _shown(self, value: Any) -> Any:
        """A result: the weight itself, a view of it, or anything else."""
        if id(value) in self._given:
            return self._given[id(value)]
        if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            return value  # which has no storage that could be asked for
        if type(value) is Tensor and value.layout is torch.strided and not value.requires_grad:
            found = self._wholes.get(value.untyped_storage()._cdata)
            if found is not None:
                return _shown(*found, value)
        return value


def _has_master(value: Tensor) -> bool:
    """Whether it is a weight, and not a parameter that was made from one."""
    return not (isinstance(value, ShownWeight) and value.requires_grad)


def _shown(master: MasterWeight, whole: Tensor, values: Tensor | None = None) -> ShownWeight:
    """`values`, which share the memory of `whole`, the weight that `master` shows."""
    values = whole if values is None else values
    with plainly():
        shown = values.as_subclass(ShownWeight)
    shown._master, shown._whole, shown._plain = master, whole, values
    return shown


UpperHalf.call = staticmethod(_call)


def split(parameter: Any) -> None:
    """Makes a plain float32 parameter the upper half of its weight, in place."""
    with plainly():
        upper, low_bits = formats.split(parameter)
    set_memory(parameter, upper)
    parameter.__class__ = SplitParameter
    parameter._master = MasterWeight(parameter, low_bits)


def join(parameter: Any) -> None:
    """Makes a split parameter plain float32 again."""
    if type(parameter) is SplitParameter:
        # The same memory as that of whoever holds the weight.
        weight = parameter._master.show()
        split_storage.free(weight.untyped_storage())
        parameter._master.leave()
        del parameter._master
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        gradient, parameter.grad = parameter.grad, None
        set_memory(parameter, weight)
        if parameter.grad_dtype is None:  # by `_set_gradient`
            parameter.grad_dtype = torch.float32
        give_gradient(parameter, gradient)
