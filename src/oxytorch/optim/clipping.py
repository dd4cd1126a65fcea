"""Clipping by the norm of all gradients: one sweep that reads them, none that only scales them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_as_torch
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from .. import _library
from ..ops.global_norm import global_norm
from . import release as _release
from . import sharding
from .gpu import devices
from .compiler import never_compiled, without_compiler
from .batch import FUSED, is_dense

if TYPE_CHECKING:
    from .gpu.norm_launch_plan import KeptNorm

_LEAST_NORM = 1e-6


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ with the 2-norm from one fused sweep.

    Multiplies all gradients, in place, by min(1, max_norm / (norm + 1e-6)), and returns the norm of
    all of them together, in the dtype that torch gives it. It is summed in float64, with the same
    bits for any number of threads. On the CPU gradients that are short enough are not written; on a
    GPU nothing waits for the norm. What is not a dense float32, bfloat16 or float16 gradient on one
    device, other norms and sharded gradients go torch's own way. `FusedOptimizer.clip_grad_norm_`
    saves the sweep that scales.

    Raises RuntimeError for a norm that is not finite if `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        _release.refuse_clipping(parameters)
    if foreach is not False and _is_planned(gradients, norm_type):
        return _clip_planned(gradients, max_norm, norm_type, error_if_nonfinite)
    if not _is_fused(gradients, norm_type) or foreach is False:
        usual: Tensor = clip_as_torch(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return usual
    with torch.no_grad():
        norm = global_norm(gradients)
        _check_finite(norm, norm_type, error_if_nonfinite)
        factor = clip_factor(max_norm, norm)
        if factor.item() != 1.0:
            torch._foreach_mul_(gradients, factor)
        return norm.to(_common_dtype(gradients))


def _clip_planned(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    from .gpu.norm_launch_plan import NormPlan

    device = devices.find(gradients[0].device)
    assert device is not None
    with torch.no_grad():
        norm, factor = NormPlan(gradients, device).run(float(max_norm), None)
        _check_finite(norm, norm_type, error_if_nonfinite)
        torch._foreach_mul_(gradients, factor)
        return norm.to(_common_dtype(gradients))


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """What gradients of that norm are multiplied by, in torch's arithmetic."""
    return torch.clamp(float(max_norm) / (norm + _LEAST_NORM), max=1.0)


def _is_fused(gradients: Sequence[Tensor], norm_type: float) -> bool:
    return (
        _library.loaded
        and len(gradients) > 0
        and float(norm_type) == 2.0
        and all(
            type(gradient) is Tensor
            and gradient.is_cpu
            and gradient.layout is torch.strided
            and gradient.dtype in FUSED
            for gradient in gradients
        )
    )


def _is_planned(gradients: Sequence[Tensor], norm_type: float) -> bool:
    """Whether GPU kernels take the norm of the gradients."""
    if not gradients or float(norm_type) != 2.0 or devices.find(gradients[0].device) is None:
        return False
    return all(
        type(gradient) is Tensor
        and gradient.device == gradients[0].device
        and gradient.layout is torch.strided
        and gradient.dtype in FUSED
        and is_dense(gradient)
        for gradient in gradients
    )


def _common_dtype(gradients: Sequence[Tensor]) -> torch.dtype:
    """The dtype that torch.stack gives to their norms."""
    dtypes = list({gradient.dtype for gradient in gradients})
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return common


def _check_finite(norm: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


@dataclass(frozen=True)
class Clipping:
    """A factor that the next step multiplies gradients by.

    gradients: those that it was computed from, of `parameters`. versions: their versions then.
    is_scaled: whether they contained the scale of a GradScaler, which looks at them, or divides it
    out of them, once before the step.
    """

    factor: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]
    versions: list[int]
    is_scaled: bool

    def valid_factor(self, name: str, has_scale: bool) -> Tensor | None:
        """The factor, after checking that gradients are still what it was computed from.

        None if gradients are all gone or replaced: they are not clipped, as in torch. has_scale:
        whether a GradScaler leaves its scale to the step.
        """
        kept = self.gradients
        same = list(map(is_, map(attrgetter("grad"), self.parameters), kept))
        if not any(same):
            return None
        writes = {now - then for now, then in zip(_versions(kept), self.versions, strict=True)}
        expected = {_scaler_writes() if self.is_scaled else 0}
        if not all(same) or writes != expected or (has_scale and not self.is_scaled):
            raise RuntimeError(
                f"{name}: gradients are not those that clip_grad_norm_ saw, whose factor the step "
                "was to apply; call it last before the step, with scaler= if there is a GradScaler "
                "(oxytorch.optim.clip_grad_norm_ scales gradients at once)"
            )
        return self.factor


class ClippingOptimizer(Optimizer):
    """An optimizer whose next step can clip gradients by their norm."""

    _release: _release.Release | None = None
    _clipping: Clipping | None = None
    _clip_factor: Tensor | None = None
    _kept_norm: KeptNorm | None = None
    # Plans whose tables graphs read whenever they run.
    _captured: list[Any]

    @never_compiled
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        scaler: Any = None,
    ) -> Tensor:
        """Clips gradients in the next step: they are read once here and written nowhere.

        The step multiplies all gradients by min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm_`
        would before it. The last call before a step counts; `zero_grad` and steps end it, and
        gradients must not change in between.

        Args:
            max_norm: of the gradients of all parameters together.
            norm_type: order of the norm; others than 2 are computed by torch.
            error_if_nonfinite: raises RuntimeError for a norm that is not finite.
            scaler: the torch.amp.GradScaler of the gradients; its scale is divided out of the norm,
                unless `scaler.unscale_` has divided it out of the gradients.

        Returns:
            The norm before clipping, of gradients that are not scaled.
        """
        if self._release is not None:
            self._release.refuse("clip_grad_norm_")
        self._clipping = None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parameters = [own for group in self.param_groups for own in group["params"]]
            having = [own for own in parameters if own.grad is not None]
            gradients = list(map(attrgetter("grad"), having))
            is_scaled = self._is_scaled_by(scaler)
            scale = scaler._get_scale_async() if is_scaled else None
            if _is_planned(gradients, norm_type):
                kept = self._norm_of(parameters, gradients)
                norm, factor = kept.plan.run(float(max_norm), scale)
                dtype = _common_dtype(gradients)
            else:
                norm, dtype = _norm(gradients, norm_type)
                if scale is not None:
                    norm = norm / scale.to(norm.device)
                factor = clip_factor(max_norm, norm)
            _check_finite(norm, norm_type, error_if_nonfinite)
            versions = _versions(gradients)
            self._clipping = Clipping(factor, having, gradients, versions, is_scaled)
            return norm.to(dtype)

    def _norm_of(self, parameters: list[Tensor], gradients: list[Tensor]) -> KeptNorm:
        from .gpu.norm_launch_plan import KeptNorm

        if self._kept_norm is None or not self._kept_norm.is_current(parameters):
            device = devices.find(gradients[0].device)
            assert device is not None
            before, self._kept_norm = self._kept_norm, KeptNorm(parameters, gradients, device)
            if before is not None and before.plan.is_captured:
                self._captured.append(before.plan)
        return self._kept_norm

    @never_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also ends a clipping that no step has applied."""
        self._clipping = None
        with torch._C.DisableTorchFunctionSubclass():
            without_compiler(super().zero_grad)(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        without_compiler(super().add_param_group)(param_group)

    def _is_scaled_by(self, scaler: Any) -> bool:
        """Whether gradients still contain the scale of a GradScaler."""
        if scaler is None or not scaler.is_enabled():
            return False
        state = scaler._per_optimizer_states.get(id(self))
        return state is None or state["stage"].name != "UNSCALED"

    def _takes_scale(self) -> bool:
        """Whether a GradScaler leaves its scale, and what was not finite, to the step.

        So it is where torch would refuse or a GPU would be waited for, and where this optimizer is
        to clip or steps in backward. Else the scaler divides it out itself, as it does for torch's
        classes, and Lightning may clip in between.
        """
        if self._clipping is not None or self._release is not None:
            return True
        return any(
            parameter.dtype == torch.float16 or devices.find(parameter.device) is not None
            for group in self.param_groups
            for parameter in group["params"]
        )

    def _set_takes_scale(self, value: bool) -> None:
        """torch's classes say so when they are made with `fused=True`; it changes nothing here."""

    _step_supports_amp_scaling: Any = property(_takes_scale, _set_takes_scale)
    """What a GradScaler asks; torch's classes declare it as an attribute."""

    @contextmanager
    def _applied_clipping(self) -> Iterator[None]:
        """Sets the factor for the updates inside, and ends the clipping."""
        clipping, self._clipping = self._clipping, None
        if clipping is not None:
            has_scale = getattr(self, "grad_scale", None) is not None
            self._clip_factor = clipping.valid_factor(type(self).__name__, has_scale)
        try:
            yield
        finally:
            self._clip_factor = None


@functools.cache
def _scaler_writes() -> int:
    """By how much a GradScaler raises the version of a gradient that it looks at."""
    gradient = torch.zeros(1)
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(1), torch.ones(1))
    return gradient._version - before


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [sharding.peek(tensor)._version for tensor in tensors]


def _norm(gradients: Sequence[Tensor], norm_type: float) -> tuple[Tensor, torch.dtype]:
    """The norm of all gradients, and the dtype that torch would give it."""
    if _is_fused(gradients, norm_type):
        return global_norm(gradients), _common_dtype(gradients)
    norm = get_total_norm(gradients, norm_type)
    if sharding.is_sharded(norm):
        whole: Any = norm
        norm = whole.full_tensor()
    return norm, norm.dtype
