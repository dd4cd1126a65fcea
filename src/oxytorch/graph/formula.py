"""The formula that a module computes, read off the operators of a real run.

An expression is a nested tuple of operator names, constants and the names of what went in. Sums and
products are written flat and in order, powers and quotients as powers, so that the ways of spelling
one formula give one expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.interruption import pass_on_interruption
from ..core.modes import OwnDispatchMode
from .code import CodeWatch
from .record import KIND_READS, name_of
from .state import unchanged

Expression = Any

_SAME = {"view", "_unsafe_view", "reshape", "alias", "detach", "clone", "lift_fresh", "contiguous"}
_SHORT = {torch.float32, torch.bfloat16, torch.float16}
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}


class _Unknown(Exception):
    """The run is no formula of what went in."""


class _Reader(OwnDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._found: dict[int, Expression] = dict(names)
        self._alive: list[Tensor] = []

    def of(self, value: Any) -> Expression:
        if isinstance(value, Tensor):
            if id(value) in self._found:
                return self._found[id(value)]
            raise _Unknown
        if isinstance(value, float):
            return _rounded(value)
        return tuple(map(self.of, value)) if isinstance(value, (list, tuple)) else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise _Unknown
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise _Unknown
        name = func._schema.name.removeprefix("aten::")
        if name in ("permute", "transpose") and args[0].dim() == 2:
            swapped = result.stride() == args[0].stride()[::-1] != args[0].stride()
            if swapped and not kwargs:  # `weight.T` is `weight.t()`
                name, args = "t", args[:1]
        keeps_shape = name in _SAME and result.shape == args[0].shape
        is_cast = name == "_to_copy" and {result.dtype, args[0].dtype} <= _SHORT
        if keeps_shape or is_cast:
            found = self.of(args[0])
        else:
            found = _simplified(name, [*map(self.of, args)], kwargs)
        self._found[id(result)] = found
        self._alive.append(result)  # which keeps the id valid
        return result


def expression(
    run: Callable[[Tensor], Any],
    x: Tensor,
    names: Mapping[str, Tensor],
    module: nn.Module | None = None,
) -> Expression:
    """Return the expression that `run` computes of x, or None where it is none, or where its code
    may compute something else of another x.

    names: the tensors that it may use besides, by the names that they get.
    module: the one whose code runs.
    """
    module = nn.Module() if module is None else module
    reader = _Reader({id(x): "x", **{id(tensor): name for name, tensor in names.items()}})
    refusals: list[str] = []
    watch = CodeWatch(refusals.append, lambda *_: None, lambda: module)
    functions = _Functions(watch)
    try:
        with unchanged(module), torch.no_grad(), watch.watching(), functions, reader:
            result = run(x)
        found = reader.of(result) if isinstance(result, Tensor) else None
    except _Unknown:
        return None
    except Exception as error:  # a user's module may refuse x in any way: then it is something else
        pass_on_interruption(error)
        return None
    return None if refusals or (functions.reads_shapes and watch.branches) else found


def result_of(run: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return what a module's code gives for x, or None where it takes no one such tensor."""
    try:
        with unchanged(module), torch.no_grad():
            result = run(x)
    except Exception as error:  # by which a user's module only says that it is something else
        pass_on_interruption(error)
        return None
    return result if isinstance(result, torch.Tensor) else None


class _Functions(TorchFunctionMode):
    """Notes whether the code looks at sizes, which may decide what it computes."""

    def __init__(self, watch: CodeWatch) -> None:
        super().__init__()
        self.reads_shapes = False
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self._watch.looking_away():
            if name_of(func) == "__getitem__" and len(args) == 2 and isinstance(args[1], str):
                raise TypeError("a tensor has no keys")  # of which torch warns first
            result = func(*args, **(kwargs or {}))
            if not isinstance(result, Tensor) and name_of(func) not in KIND_READS:
                self.reads_shapes = True
            return result


def _simplified(name: str, args: list[Any], kwargs: dict[str, Any]) -> Expression:
    if name in ("add", "sub", "rsub") and kwargs.get("alpha", 1) == 1 and len(args) == 2:
        left, right = args if name != "rsub" else args[::-1]
        return _sum([left, right if name == "add" else _product([-1.0, right])])
    if name == "mul":
        return _product(args)
    if name == "neg":
        return _product([-1.0, args[0]])
    if name == "div" and not kwargs:
        return _product([args[0], _power(args[1], -1.0)])
    if name in _POWERS:
        return _power(args[0], _POWERS[name])
    if name == "pow" and isinstance(args[1], (int, float)):
        return _power(args[0], float(args[1]))
    if name == "mean" and len(args) > 1:
        args = [args[0], tuple(args[1]), *args[2:]]
    given = tuple((key, str(value)) for key, value in sorted(kwargs.items()) if value is not None)
    return (name, *map(_constant, args), *given)


def _constant(value: Any) -> Any:
    return _rounded(value) if isinstance(value, (int, float)) and type(value) is not bool else value


def _rounded(value: float) -> float:
    """A constant as far as float32 tells it."""
    return float(f"{float(value):.6e}")


def _power(base: Expression, exponent: float) -> Expression:
    if isinstance(base, (int, float)):
        return _rounded(base**exponent)
    if exponent in (2.0, 3.0):
        return _product([base] * int(exponent))
    if base[0] == "power":
        return _power(base[1], base[2] * exponent)
    return base if exponent == 1.0 else ("power", base, exponent)


def _sum(terms: list[Expression]) -> Expression:
    return _flat("sum", terms, 0.0, lambda a, b: a + b)


def _product(factors: list[Expression]) -> Expression:
    return _flat("product", factors, 1.0, lambda a, b: a * b)


def _flat(
    name: str, items: list[Expression], neutral: float, joined: Callable[[float, float], float]
) -> Expression:
    constant = neutral
    rest: list[Expression] = []
    for item in items:
        if isinstance(item, (int, float)):
            constant = joined(constant, item)
        elif isinstance(item, tuple) and item[0] == name:
            constant = joined(constant, item[1])
            rest += item[2:]
        else:
            rest.append(item)
    if len(rest) == 1 and constant == neutral:
        return rest[0]
    return (name, _rounded(constant), *sorted(rest, key=repr))
