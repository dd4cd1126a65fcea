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
from ..core.tensor_forms import is_dense
from ..ops.global_norm import global_norm
from . import release, sharding
from .batch import FUSED, IS_CPU
from .gpu import devices

if TYPE_CHECKING:
    from .gpu.norm_launch_plan import CachedNorm

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
    bits for any number of threads. On the CPU gradients are not written if the norm is small
    enough; on a GPU nothing waits for the norm. Other norms, sharded gradients, and gradients that
    are not dense float32, bfloat16 or float16 on one device use torch's own function.
    `FusedOptimizer.clip_grad_norm_` saves the sweep that scales.

    Raises RuntimeError for a norm that is not finite if `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        release.refuse_clipping(parameters)
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
    from .gpu.norm_launch_plan import NormLaunchPlan

    device = devices.find(gradients[0].device)
    assert device is not None
    with torch.no_grad():
        norm, factor = NormLaunchPlan(gradients, device).run(float(max_norm), None)
        _check_finite(norm, norm_type, error_if_nonfinite)
        torch._foreach_mul_(gradients, factor)
        return norm.to(_common_dtype(gradients))


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """What gradients of that norm are multiplied by, in torch's arithmetic."""
    return torch.clamp(float(max_norm) / (norm + _LEAST_NORM), max=1.0)


def _is_fused(gradients: Sequence[Tensor], norm_type: float) -> bool:
    """Whether the compiled op takes the norm of the gradients."""
    return _library.loaded and _are_plain(gradients, norm_type) and all(map(IS_CPU, gradients))


def _is_planned(gradients: Sequence[Tensor], norm_type: float) -> bool:
    """Whether GPU kernels take the norm of the gradients."""
    if not gradients or devices.find(gradients[0].device) is None:
        return False
    places = {gradient.device for gradient in gradients}
    return len(places) == 1 and _are_plain(gradients, norm_type) and all(map(is_dense, gradients))


def _are_plain(gradients: Sequence[Tensor], norm_type: float) -> bool:
    return (
        len(gradients) > 0
        and float(norm_type) == 2.0
        and all(
            type(gradient) is Tensor
            and gradient.layout is torch.strided
            and gradient.dtype in FUSED
            for gradient in gradients
        )
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

    gradients: those that it was computed from, of `parameters`.
    versions: their versions then.
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


class Clipper:
    """Clips the gradients of an optimizer in its next step.

    factor: what the step that is under way multiplies gradients by.
    """

    def __init__(self) -> None:
        self.factor: Tensor | None = None
        # What graphs that were captured read whenever they run.
        self.captured: list[Any] = []
        self._pending: Clipping | None = None
        self._cached_norm: CachedNorm | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the next step is to clip."""
        return self._pending is not None

    def cancel(self) -> None:
        """Ends a clipping that no step has applied."""
        self._pending = None

    def clip(
        self,
        parameters: list[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        scale: Tensor | None,
    ) -> Tensor:
        """Computes the factor for the next step; returns the norm, of gradients without `scale`."""
        self._pending = None
        having = [own for own in parameters if own.grad is not None]
        gradients = list(map(attrgetter("grad"), having))
        if _is_planned(gradients, norm_type):
            plan = self._norm_of(parameters, gradients).plan
            norm, factor = plan.run(float(max_norm), scale)
            dtype = _common_dtype(gradients)
        else:
            norm, dtype = _norm(gradients, norm_type)
            if scale is not None:
                norm = norm / scale.to(norm.device)
            factor = clip_factor(max_norm, norm)
        _check_finite(norm, norm_type, error_if_nonfinite)
        versions = _versions(gradients)
        self._pending = Clipping(factor, having, gradients, versions, scale is not None)
        return norm.to(dtype)

    def _norm_of(self, parameters: list[Tensor], gradients: list[Tensor]) -> CachedNorm:
        from .gpu.norm_launch_plan import CachedNorm

        if self._cached_norm is None or not self._cached_norm.is_current(parameters):
            device = devices.find(gradients[0].device)
            assert device is not None
            before, self._cached_norm = self._cached_norm, CachedNorm(parameters, gradients, device)
            if before is not None and before.plan.table.is_captured:
                self.captured.append(before.plan)
        return self._cached_norm

    @contextmanager
    def applied(self, name: str, has_scale: bool) -> Iterator[None]:
        """Sets the factor for the updates inside, and ends the clipping.

        name: of the optimizer's class.
        has_scale: whether a GradScaler leaves its scale to them.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self.factor = pending.valid_factor(name, has_scale)
        try:
            yield
        finally:
            self.factor = None


def is_scaled_by(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether the optimizer's gradients still contain the scale of a GradScaler."""
    if scaler is None or not scaler.is_enabled():
        return False
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"].name != "UNSCALED"


@functools.cache
def _scaler_writes() -> int:
    """By how much a GradScaler raises the version of a gradient that it looks at."""
    gradient = torch.zeros(1, device="cpu")
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    )
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
