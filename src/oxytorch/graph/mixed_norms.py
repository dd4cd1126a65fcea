"""Normalizations whose input has another dtype than their parameters, under transformations.

torch's kernels take such inputs. The formulas of torch.func and of forward-mode AD do not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.modes import is_transformed

_NORMS = frozenset({"layer_norm", "group_norm", "batch_norm", "instance_norm"})
_NOTHING = nullcontext()


class _InOneDtype(TorchFunctionMode):
    """Normalizes in the parameters' dtype, and returns that of the input, as the kernels do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in _NORMS and args and isinstance(args[0], Tensor):
            values = (*args[1:], *kwargs.values())
            dtype = next((v.dtype for v in values if isinstance(v, Tensor)), args[0].dtype)
            if dtype != args[0].dtype:
                return function(args[0].to(dtype), *args[1:], **kwargs).to(args[0].dtype)
        return function(*args, **kwargs)


def norms_in_one_dtype() -> AbstractContextManager[Any]:
    """A block whose normalizations can be transformed, where a transformation is going on."""
    return _InOneDtype() if is_transformed() else _NOTHING
