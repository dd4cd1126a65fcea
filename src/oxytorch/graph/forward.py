"""What stands in a module's instance dictionary in place of its own forward."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils import _pytree as pytree

from ..core.converted import Conversion
from ..core.layer_functions import functions_of
from ..core.packed import PackedTensor, packed_later
from ..core.reordered import ReorderedTensor
from ..core.watched import is_parameter

_torch: Any = torch._C  # its stubs lack functions


def first_numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The elements of the first tensor among arguments; 0 where there is none."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(given, torch.Tensor):
        leaves = pytree.tree_leaves((args, [*kwargs.values()]))
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    return 0 if given is None else given.numel()


class OwnSignature:
    """Looks like a module's own forward to code that asks for its names, code and annotations, or
    that binds it to its module as a function (accelerate, where it takes its wrappers off).

    module: the one in whose instance dictionary it lies.
    stands_in: whether it is left out where the module's own code is to be looked at
        (`core.modes.own_code`).
    """

    stands_in = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __init_subclass__(cls) -> None:
        # A class gets annotations of its own where somebody asks for them, which would hide this.
        setattr(cls, "__annotations__", vars(OwnSignature)["__annotations__"])  # noqa: B010

    @property
    def __wrapped__(self) -> Any:
        """The module's own method, for code that asks for the signature."""
        return types.MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> Any:
        return inspect.unwrap(self.__wrapped__).__code__

    @property
    def __globals__(self) -> Any:
        if sys._getframe(1).f_code.co_name == "get_closure":  # of torch.jit
            raise RuntimeError(
                f"torch.jit.script cannot compile an optimized {type(self.module).__name__}; use "
                "torch.jit.trace, or script the stock model, which oxytorch.undo(model) gives back"
            )
        expose_weights(self.module)
        return inspect.unwrap(self.__wrapped__).__globals__

    @property
    def __closure__(self) -> Any:
        return inspect.unwrap(self.__wrapped__).__closure__

    @property
    def __defaults__(self) -> Any:
        return inspect.unwrap(self.__wrapped__).__defaults__

    @property
    def __kwdefaults__(self) -> Any:
        return inspect.unwrap(self.__wrapped__).__kwdefaults__

    @property
    def __annotations__(self) -> Any:  # type: ignore[override]
        return inspect.unwrap(self.__wrapped__).__annotations__

    @property
    def __name__(self) -> str:
        return "forward"


class AroundForward(OwnSignature):
    """Stands around the forward that a module has: its class's, or one in its instance dictionary.

    inner: that one, None where it is its class's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to compute")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without this."""
        if args and args[0] is self.module:
            return self(*args[1:], **kwargs)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class Forward(OwnSignature):
    """Stands in for a module's own forward where it may; else that runs, on plain values.

    module: the one in whose instance dictionary it lies.
    converts: whether the module's weights were given another dtype, so that floating inputs are
        converted to it.
    """

    def __init__(self, module: nn.Module, converts: bool = False) -> None:
        super().__init__(module)
        self.converts = converts
        self._class, self._class_forward = type(module), type(module).forward
        self._functions = _functions(module)
        self._has_bias = "bias" in module._parameters
        self._lost: dict[str, Any] = {}  # weights that were packed before a file was written

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        module = self.module
        if args and args[0] is module:
            return self(*args[1:], **kwargs)
        if torch._C._get_tracing_state() is not None:
            expose_weights(module)
        elif not is_compiling() and not torch._C._len_torch_dispatch_stack():
            _take_out(module)
        if self.converts and not torch.is_autocast_enabled("cpu"):
            dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            if dtype is not None:
                args, kwargs = Conversion(dtype).arguments(args, kwargs)
        return type(module).forward(self._home(), *args, **kwargs)

    def _home(self) -> nn.Module:
        """What the module's own forward is called on."""
        return self.module

    def _bias(self) -> Any:
        """The bias parameter, None where there is none, or False where it is no vector and plain
        parameter any more or where the class is another one or has another forward, or a function
        that it calls was replaced."""
        kind = type(self.module)
        if kind is not self._class or kind.forward is not self._class_forward:
            return False
        for name, function in self._functions:
            if _FUNCTIONAL[name] is not function:
                return False
        bias = self.module._parameters.get("bias", False) if self._has_bias else None
        is_usual = bias is None or (is_parameter(bias) and bias.dim() == 1)
        return bias if is_usual else False

    def _repack(self) -> None:
        """Make packed weights of those that came as plain ones from a file."""
        lost, self._lost = self._lost, {}
        for name, (kind, fields) in lost.items():
            plain = self.module._parameters.get(name)
            if is_parameter(plain) and plain.device.type == "cpu":
                # Layers that share a weight find the one that was made of it.
                made = plain.__dict__.get("_oxytorch_packed")
                if made is None:
                    made = plain._oxytorch_packed = packed_later(kind, plain, fields)  # type: ignore[attr-defined]
                setattr(self.module, name, made)

    def __getstate__(self) -> dict[str, Any]:
        held: dict[str, Any] = self.module._parameters
        packed = {
            name: (type(weight), weight.fields())
            for name, weight in held.items()
            if isinstance(weight, ReorderedTensor)
            and (not weight.cell.keeps_plain or getattr(weight, "takes_plain", False))
        }
        return {**self.__dict__, "_functions": (), "_lost": {**self._lost, **packed}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._functions = _functions(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to compute")


def _take_out(module: nn.Module) -> None:
    """Have the plain values of packed weights stay for the calls after this one."""
    for weight in module._parameters.values():
        if isinstance(weight, PackedTensor) and weight.cell.plain is None:
            weight.plain()


_FUNCTIONAL = vars(functional)


def _functions(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The functions of torch.nn.functional that a layer calls, as they are now."""
    return tuple((name, _FUNCTIONAL[name]) for _, name in functions_of(type(module)))


def with_parameters(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """A module like another, but for its parameters; it shares all else with it."""
    made: Any = object.__new__(type(module))
    made.__dict__.update(module.__dict__, _parameters=parameters)
    return made


def expose_weights(module: nn.Module) -> None:
    """Give packed weights of a module the memory of their plain values: a trace keeps them."""
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        _torch._set_tracing_state(None)
    try:
        for parameter in module.parameters():
            if isinstance(parameter, PackedTensor) and not parameter.cell.is_pinned:
                parameter.expose()
    finally:
        if tracing is not None:
            _torch._set_tracing_state(tracing)
