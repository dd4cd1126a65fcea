"""Keeps torch's compiler out of optimizers: it runs around their steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch._compile

_P = ParamSpec("_P")
_R = TypeVar("_R")

_disabled: dict[Any, Callable[..., Any]] = {}


def never_compiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method, at which a program that is being compiled goes on in Python.

    As torch.compiler.disable, which would import the compiler: that takes a second or more of a
    program that never compiles. Where nobody has imported it, nothing can be compiling.
    """

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if method not in _disabled:
            disable: Callable[..., Any] = torch._dynamo.disable
            _disabled[method] = disable(method)
        result: _R = _disabled[method](*args, **kwargs)
        return result

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def without_compiler(method: Callable[_P, None]) -> Callable[_P, None]:
    """A method of torch's Optimizer without the wrapper that imports torch's compiler."""
    plain = getattr(method, "__wrapped__", None)
    code = getattr(method, "__code__", None)
    is_torchs = code is not None and code.co_filename == torch._compile.__file__
    if plain is None or not is_torchs or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(plain, getattr(method, "__self__"))  # noqa: B009
