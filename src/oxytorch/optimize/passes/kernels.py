"""Pass `kernels`: modules whose whole computation is one op of ours, wherever they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import ops
from ...graph.recognize import Norm
from ...graph.recommendation import is_plain_bag
from ...ops._post_op import PostOp
from ..context import Context

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(context: Context) -> None:
    for module in context.open_modules():
        if "forward" in module.__dict__ or module._forward_pre_hooks:
            continue
        norm = context.recognizer.norm(module)
        if norm is not None:
            context.set_forward(module, NormForward(module, norm))
            context.did("kernels", module, f"{type(module).__name__} -> ops.{norm.kind}")
            continue
        if type(module) is nn.EmbeddingBag and is_plain_bag(module):
            context.set_forward(module, EmbeddingBagForward(module))
            context.did("kernels", module, "EmbeddingBag -> ops.embedding_bag")
            continue
        post_op = context.recognizer.activation(module)
        if post_op is not None and not type(module).__module__.startswith("torch.nn"):
            context.set_forward(module, ActivationForward(post_op))
            context.did("kernels", module, f"{type(module).__name__} -> torch {post_op}")


class NormForward:
    """A normalization over the last dimension in our kernel."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.module = module
        self.norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.module._parameters
        weight = parameters.get("weight")
        if x.dtype not in _DTYPES or x.device.type != "cpu":
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        if self.norm.kind == "rms_norm":
            return ops.rms_norm(x, weight, self.norm.eps)
        return ops.layer_norm(x, weight, parameters.get("bias"), self.norm.eps)


class ActivationForward:
    """An activation that a model spells out in several operations, as torch's one."""

    def __init__(self, post_op: PostOp) -> None:
        self.post_op = post_op

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.post_op.after(x)


class EmbeddingBagForward:
    """An embedding bag in our kernel."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        module: Any = self.module
        weight = module._parameters["weight"]
        if weight.dtype not in _DTYPES or weight.device.type != "cpu":
            return type(module).forward(module, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        result: torch.Tensor = ops.embedding_bag(
            weight, input, offsets, module.mode, per_sample_weights, module.include_last_offset
        )
        return result
