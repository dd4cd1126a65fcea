"""Whether a derived value may stand in for a module's own code in the call at hand.

Speed is for plain inference. Where a gradient can be asked for, and under autocast, tracing,
compiling, exporting, functional transforms and tensor modes, the module's own code runs.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .._library import functions_in_known_torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

PLAIN, GRADIENTS, OTHER, LAYERS = range(4)
"""What `_mode` returns: plain inference, plain with gradients enabled, anything else, or plain
inference under `own_code`. The numbers are those of core/modes.cpp."""


def must_run_plain(*tensors: Tensor | None) -> bool:
    """Whether the module's own code has to run on plain values.

    tensors: those that a gradient could be asked of, the parameters among them.
    """
    if is_dynamo_compiling() or forward_ad._current_level >= 0:
        return True
    mode = _mode()
    if mode == PLAIN:
        return False
    if mode == GRADIENTS:
        return any(t is not None and t.requires_grad for t in tensors)
    return mode == OTHER


def is_plain_inference() -> bool:
    """Whether no gradient can be asked of anything, and no mode is active."""
    return not is_dynamo_compiling() and forward_ad._current_level < 0 and _mode() == PLAIN


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD looks at the operators, without torch's compiler."""
    if torch.compiler.is_compiling():
        return False
    level = torch._C._functorch.maybe_current_level()
    return forward_ad._current_level >= 0 or level is not None


def is_traced_by_proxies() -> bool:
    """Whether `make_fx` traces the operators, which takes no parameters of types that it does not
    know."""
    if is_dynamo_compiling():
        return False
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def is_unseen() -> bool:
    """Whether nobody can tell how results are computed: plain inference, and no profiler."""
    library = functions_in_known_torch()
    return library is not None and is_plain_inference() and not library.oxytorch_calls_are_noted()


def with_normal_tensors(function: _Function) -> _Function:
    """A function that makes tensors that are kept and looked at for writes, in inference mode too,
    whose own tensors do not count the writes to them."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(_Function, run)


class OwnFunctionMode(TorchFunctionMode):
    """A function mode of ours, under which derived values stand in as without it."""

    def __enter__(self) -> Any:
        _count(_MODES, 1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _count(_MODES, -1)


@contextmanager
def recording() -> Iterator[None]:
    """While a run is recorded that is to use derived values, under modes that only look on."""
    _learn_dispatch_mode()
    _own.runs = runs_recorded() + 1
    _count(_RECORDINGS, 1)
    try:
        yield
    finally:
        _count(_RECORDINGS, -1)


@contextmanager
def own_code() -> Iterator[None]:
    """While all but single layers are to run their own code, so that it can be looked at."""
    _count(_CODE, 1)
    try:
        yield
    finally:
        _count(_CODE, -1)


def runs_recorded() -> int:
    """How many runs were recorded on this thread: what one left must not serve the next."""
    return _counted("runs")


@functools.cache
def _learn_dispatch_mode() -> None:
    library = functions_in_known_torch()
    if library is not None:
        with _disable_current_modes():  # under which another one would add nothing
            library.oxytorch_learn_dispatch_mode(0)
            with OwnDispatchMode():
                library.oxytorch_learn_dispatch_mode(1)


class OwnDispatchMode(TorchDispatchMode):
    """A dispatch mode of ours, entered without torch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler


class FunctionsTo(TorchFunctionMode):
    """A function mode that hands each call to `call(function, args, kwargs)`."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


_own = threading.local()

_MODES = "oxytorch_enter_own_mode"
_CODE = "oxytorch_ask_for_own_code"
_RECORDINGS = "oxytorch_record"


def _count(what: str, by: int) -> None:
    """Add to one of this thread's three counts, of which the library has one too."""
    library = functions_in_known_torch()
    if library is not None:
        getattr(library, what)(by)
    setattr(_own, what, _counted(what) + by)


def _counted(what: str) -> int:
    found: int = getattr(_own, what, 0)
    return found


def has_function_modes() -> bool:
    """Whether a function mode of somebody else's may change what operators do.

    That of a default device says where new tensors are made. Derived values make theirs on the CPU.
    """
    count = torch._C._len_torch_function_stack() - _counted(_MODES)
    return count > int(_has_default_device())


def _has_default_device() -> bool:
    """Whether `torch.set_default_device` or `with torch.device(...)` set one on this thread."""
    if not torch._C._len_torch_function_stack():
        return False
    return isinstance(torch._C._get_function_stack_at(0), DeviceContext)  # torch keeps it there


def _asked() -> int:
    """The mode, by asking torch in Python."""
    is_looked_on = _counted(_RECORDINGS) or not (
        torch._C._len_torch_dispatch_stack() or has_function_modes()
    )
    if (
        not is_looked_on
        or torch._C._is_any_autocast_enabled()
        or torch._C._is_tracing()
        or torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return OTHER
    if torch.is_grad_enabled():
        return GRADIENTS
    return LAYERS if _counted(_CODE) else PLAIN


def _chosen() -> Callable[[], int]:
    library = functions_in_known_torch()
    if library is None:
        return _asked
    keys = torch._C.DispatchKey
    signs = torch._C.DispatchKeySet(keys.Conjugate) | torch._C.DispatchKeySet(keys.Negative)
    library.oxytorch_learn_signs(ctypes.c_uint64(signs.raw_repr()))
    with torch.inference_mode():
        known = library.oxytorch_learn_inference_mode()
    return library.oxytorch_mode if known else _asked


_asked_quickly = _chosen()


def _mode() -> int:
    """The mode of this thread, to which that of a default device does not count."""
    found = _asked_quickly()
    if found == OTHER and _has_default_device() and not has_function_modes():
        _count(_MODES, 1)
        try:
            found = _asked_quickly()
        finally:
            _count(_MODES, -1)
    return found
