"""The modes of the thread that asks for a call, on the thread that makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.modes import has_function_modes

_DEVICES = ("cpu", "cuda", "xpu")


def is_followed() -> bool:
    """Whether a mode looks at this thread's operators that another thread would not have.

    These are tracing, compiling and recording, tensor modes, torch.func and forward-mode AD.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or has_function_modes()
        or forward_ad._current_level >= 0
        or torch._C._functorch.maybe_current_level() is not None
    )


class Caller(NamedTuple):
    """Grad mode, inference mode and autocast as they were where a call was asked for."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device, dtype, whether casts are kept

    @classmethod
    def of_this_thread(cls) -> Caller:
        """The modes of the calling thread."""
        autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
        if torch._C._is_any_autocast_enabled():
            autocast = tuple(
                (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
                for device in _DEVICES
                if torch.is_autocast_enabled(device)
            )
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function under these modes."""
        if self.autocast:
            with ExitStack() as stack:
                for device, dtype, cache in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype, cache_enabled=cache))
                return self._replace(autocast=()).call(function, args, kwargs)
        if self.inference != torch.is_inference_mode_enabled():
            with torch.inference_mode(self.inference):
                return self.call(function, args, kwargs)
        if self.grad != torch.is_grad_enabled():
            with torch.set_grad_enabled(self.grad):
                return function(*args, **kwargs)
        return function(*args, **kwargs)
