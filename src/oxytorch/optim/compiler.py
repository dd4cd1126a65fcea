"""Keeps torch's compiler out of optimizers, around whose steps it runs, and of what asks for it."""

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


def never_compiled_alone(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which torch's compiler takes into what calls it and never compiles by itself.

    For functions that ask `torch.compiler.is_compiling()`. Where the compiler has given up a frame,
    that runs in Python and the compiler looks at each function that it calls: such a one, compiled
    by itself, would say yes to code that is not being compiled.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip, usual = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    code: Any = getattr(function, "__code__")  # noqa: B009
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, usual))
    return function


def without_compiler(method: Callable[_P, None]) -> Callable[_P, None]:
    """A method of torch's Optimizer without the wrapper that imports torch's compiler."""
    plain = getattr(method, "__wrapped__", None)
    code = getattr(method, "__code__", None)
    is_torchs = code is not None and code.co_filename == torch._compile.__file__
    if plain is None or not is_torchs or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(plain, getattr(method, "__self__"))  # noqa: B009
