"""Pass `kernels`: modules whose whole computation is one op of ours, wherever they are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ... import ops
from ...core.modes import must_run_plain
from ...core.sources import Sources
from ...core.watched import is_parameter
from ...graph.boundary import first_dtype, given_back
from ...graph.forward import Forward
from ...graph.fused import is_computed
from ...graph.recognize import BATCH_NORMS, BatchNorm, RecognizedNorm, batch_norm_of_module
from ...graph.recommendation import is_plain_bag
from ...ops.post_op import PostOp
from ...rewriting.measure import (
    USUAL_ROWS,
    Calls,
    calls_of,
    first_win,
    may_stay_beside,
    numbers,
    rows_of,
)
from ..context import OptimizeContext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(context: OptimizeContext) -> None:
    for module in context.open_modules():
        if "forward" in module.__dict__:
            continue
        norm = context.recognizer.norm(module)
        if norm is not None:
            forward = NormForward(module, norm, bool(context.dtype_of))
            if not _norm_pays(context, module, forward):
                context.skipped("kernels", module, "by itself, torch's own is as fast here")
                continue
            context.log.set_forward(module, forward)
            context.applied("kernels", module, f"{type(module).__name__} -> ops.{norm.kind}")
            continue
        if context.recognizer.batch_norm(module) is not None and type(module) not in BATCH_NORMS:
            forward = FrozenNormForward(module)
            if _frozen_norm_pays(context, module, forward):
                context.log.set_forward(module, forward)
                context.applied("kernels", module, f"{type(module).__name__} -> torch batch_norm")
            continue
        if type(module) is nn.EmbeddingBag and is_plain_bag(module) and not _differs(module):
            context.log.set_forward(
                module, EmbeddingBagForward(module, context.is_converted(module))
            )
            context.applied("kernels", module, "EmbeddingBag -> ops.embedding_bag")
            continue
        post_op = context.recognizer.activation(module)
        if post_op is not None and not type(module).__module__.startswith("torch.nn"):
            activation = ActivationForward(module, post_op)
            if not _activation_pays(module, activation):
                continue
            context.log.set_forward(module, activation)
            context.applied("kernels", module, f"{type(module).__name__} -> torch {post_op}")


class NormForward(Forward):
    """A normalization over the last dimension in our kernel.

    is_mixed: whether input and parameters may have different dtypes.
    sources: the module, whose attributes decide what it computes.
    """

    def __init__(self, module: nn.Module, norm: RecognizedNorm, is_mixed: bool) -> None:
        super().__init__(module)
        self.norm = norm
        # LayerNorm of torch takes parameters in float32 with any input; else stock's result may be
        # of another dtype, and only a model that was given dtypes by us has such calls.
        self.is_mixed = is_mixed or type(module) is nn.LayerNorm
        self.gives_back = False  # whether all results have the dtype of the input
        self.least_numel = 0  # with fewer values the module's own code is as fast
        self.sources = Sources([], owner=module, values=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self._takes(args[0]):
            x = args[0]
            parameters = self.module._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            plain = must_run_plain(x, weight, bias) or not fits(x, weight)
            if not self.is_mixed and weight is not None and weight.dtype != x.dtype:
                plain = True
            if not plain and self.sources.are_current():
                if self.norm.kind == "rms_norm":
                    return ops.rms_norm(x, weight, self.norm.eps)
                return ops.layer_norm(x, weight, bias, self.norm.eps)
        return self.own(*args, **kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        result = super().own(*args, **kwargs)
        given = first_dtype(args, kwargs) if self.gives_back else None
        return result if given is None else given_back(result, given)

    def _takes(self, x: Any) -> bool:
        if type(x) is not torch.Tensor or x.is_nested or x.numel() < self.least_numel:
            return False
        return is_computed(x) and x.dim() > 0


class FrozenNormForward(NormForward):
    """A batch normalization of the model's own, whose tensors are buffers, as torch's in one sweep.

    Torch's takes parameters in float32 with any input.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, RecognizedNorm("batch_norm", 0.0), is_mixed=False)
        self._norm = batch_norm_of_module(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._known() if len(args) == 1 and not kwargs and self._takes(args[0]) else None
        if norm is not None:
            x, shape = args[0], norm.mean.shape
            names = "running_mean", "running_var", "weight", "bias"
            mean, variance, weight, bias = (self.module._buffers.get(name) for name in names)
            fits = x.shape[1] == shape[0] and (x.dtype == norm.mean.dtype or self.gives_back)
            fits = fits and all(
                t is not None and t.shape == shape for t in (mean, variance, weight, bias)
            )
            if fits and not must_run_plain(x, weight, bias):
                return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, norm.eps)
        return self.own(*args, **kwargs)

    def _takes(self, x: Any) -> bool:
        return super()._takes(x) and x.dim() == 4 and x.dtype != torch.float16

    def _known(self) -> BatchNorm | None:
        """What the module computes, recognized again after a change."""
        if not self.sources.are_current():
            self.sources = Sources([], owner=self.module, values=False)
            self._norm = batch_norm_of_module(self.module)
        return self._norm


def _frozen_norm_pays(
    context: OptimizeContext, module: nn.Module, forward: FrozenNormForward
) -> bool:
    channels = len(module._buffers["running_var"])  # type: ignore[arg-type]
    size = context.observed.input_sizes.get(module) or (1, channels, 28, 28)
    x = numbers(*size)
    own: Any = type(module).forward
    both: Calls = (lambda: own(module, x), lambda: forward(x))
    return first_win((type(module), size), [both]) is not None


def _norm_pays(context: OptimizeContext, module: nn.Module, forward: NormForward) -> bool:
    """Whether our kernel is faster than the module's own code, if for many rows alone."""
    weight = module._parameters.get("weight")
    size = context.observed.input_sizes.get(module)
    if weight is None and not size:
        return True
    width = size[-1] if size else len(weight)  # type: ignore[arg-type]
    dtype = torch.float32 if weight is None else context.target_dtype(module, weight)
    rows = rows_of(size, width)

    own: Any = type(module).forward
    calls = calls_of(lambda: (partial(own, module), forward), width, size, dtype)
    kind = (
        type(module),
        width,
        dtype,
        bool(weight is None),
        size if size is None else len(size),
        rows,
    )
    first = first_win(kind, [calls(count) for count in rows])
    if first:
        forward.least_numel = rows[first] * width
        return may_stay_beside((*kind, first), calls(rows[0]))
    return first is not None


def _activation_pays(module: nn.Module, forward: ActivationForward) -> bool:
    """Whether one function of torch's is faster than the functions that the module calls."""
    x = numbers(USUAL_ROWS[1], 1024)
    own: Any = type(module).forward
    both: Calls = (lambda: own(module, x), lambda: forward(x))
    return first_win((type(module), str(forward.post_op)), [both]) is not None


def fits(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether our kernels normalize x: a last dimension of the weight's size, and not empty."""
    return weight is None or (x.dim() > 0 and x.shape[-1] == weight.shape[0])


class ActivationForward(Forward):
    """An activation that a model spells out in several operations, as torch's one."""

    def __init__(self, module: nn.Module, post_op: PostOp) -> None:
        super().__init__(module)
        self.post_op = post_op
        self.sources = Sources([], owner=module, values=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is torch.Tensor and not must_run_plain(x) and self.sources.are_current():
            return self.post_op.after(x)
        return self.own(*args, **kwargs)


def _differs(module: nn.EmbeddingBag) -> bool:
    """Whether torch divides by other counts than our kernel: those of a last bag that ends before
    the indices do."""
    return module.mode == "mean" and bool(module.include_last_offset)


class EmbeddingBagForward(Forward):
    """An embedding bag in our kernel."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            found = self._bags(*args, **kwargs)
        except (RuntimeError, TypeError):  # the module's own code says what is wrong
            found = None
        return self.own(*args, **kwargs) if found is None else found

    def _bags(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        module: Any = self.module
        weight: Any = module._parameters.get("weight")
        factors = per_sample_weights
        fits = (
            is_parameter(weight)
            and weight.dtype in _DTYPES
            and weight.is_cpu
            and type(input) is torch.Tensor
            and input.is_cpu
            and (offsets is None or (type(offsets) is torch.Tensor and offsets.is_cpu))
            and (factors is None or (type(factors) is torch.Tensor and factors.is_cpu))
            and (factors is None or factors.dtype == weight.dtype)
            and is_plain_bag(module)
            and not _differs(module)
            and not must_run_plain(weight, factors)
        )
        if not fits:
            return None
        last = module.include_last_offset
        return ops.embedding_bag(weight, input, offsets, module.mode, factors, last)
