"""A block without the tensor modes, compilers and traces that are active around it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_torch: Any = torch._C  # its stubs lack functions
_set_compiler: Any = _torch._dynamo.eval_frame.set_eval_frame
DYNAMO = "torch._dynamo.trace_rules"
"""The module by which it is known whether torch's compiler is imported."""


class no_modes:
    """Leaves tensor modes for the time of a restoration, which is nobody else's operator."""

    def __enter__(self) -> None:
        self._tracing: Any = torch._C._get_tracing_state()
        if self._tracing is not None and torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer"):
            self._tracing = None  # within an operator, which is traced as a whole
        if self._tracing is not None:
            _torch._set_tracing_state(None)
        self._compiler: Any = _set_compiler(None) if DYNAMO in sys.modules else None
        self._guard = torch._C._DisableTorchDispatch()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._transforms: Any = None
        if torch._C._functorch.maybe_current_level() is not None:
            self._transforms = temporarily_clear_interpreter_stack()
            self._transforms.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._transforms is not None:
            self._transforms.__exit__(*error)
        self._functions.__exit__(*error)
        del self._guard
        if self._compiler is not None:
            _set_compiler(self._compiler)
        if self._tracing is not None:
            _torch._set_tracing_state(self._tracing)
