"""Models that are recorded at their first call: the predecessor's `graph_mode` without a sample."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from .. import optimize
from ..core.modes import is_plain_inference
from ..optimize.sample import sample_of_call
from ..rewriting.refusals import check_evaluation, check_module

_Model = TypeVar("_Model", bound=nn.Module)


class _FirstCall:
    """The forward pre-hook of a model that is optimized with what it is called with."""

    def __init__(self, dtype: torch.dtype | None, passes: tuple[str, ...] | None) -> None:
        self.settings = (dtype, passes)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() or not is_plain_inference():
            return
        own = model._forward_pre_hooks
        for key in [key for key, hook in own.items() if hook is self]:
            del own[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
        dtype, passes = self.settings
        sample = sample_of_call(model, args, kwargs)
        is_known = sample is not None
        optimize(
            model, dtype=dtype, sample_input=sample, graph=is_known, inplace=True, passes=passes
        )


def optimize_at_first_call(
    model: _Model, dtype: torch.dtype | None, passes: tuple[str, ...] | None, inplace: bool
) -> _Model:
    """Return the model, or a copy, that becomes a program at its first call without gradients."""
    check_module("optimize", model)
    check_evaluation("optimize", model)
    result = model if inplace else copy.deepcopy(model)
    hook = _FirstCall(dtype, passes)
    result.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return result
