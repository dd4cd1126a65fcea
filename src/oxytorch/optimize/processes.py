"""Models trained by several processes: what `optimize` refuses, and how halves stay together."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..optim import _sharding, formats

ORDER = (
    "call fully_shard first, then make oxytorch.optim.AdamW from the sharded parameters "
    "(master_weights='split' where they are bfloat16), or optimize with inplace=True and no dtype"
)


def check(model: nn.Module, dtype: Any) -> None:
    """Refuses a model whose wrapping counts on the dtypes that its parameters have."""
    if dtype is None:
        return
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "optimize: expected a model that DistributedDataParallel does not wrap yet, got one "
            "that it does; wrap the model that optimize returns"
        )
    for name, parameter in model.named_parameters():
        if _sharding.is_sharded(parameter):
            raise ValueError(
                f"optimize: expected no dtype for a model with sharded parameters, got {dtype} "
                f"and the DTensor {name}; for bfloat16 computation give fully_shard a "
                "MixedPrecisionPolicy, for bfloat16 weights see master_weights='split' of "
                "oxytorch.optim"
            )


class BeforeForward:
    """Keeps the lower halves of split weights the same in all processes of DDP.

    When DDP wraps a model it copies the parameters of the first process to the others: the upper
    halves. Called before each forward of the model, this does it with the lower ones, once for a
    wrapper, when training begins: that is a moment that all processes come to.
    """

    def __init__(self, halves: dict[Tensor, Tensor]) -> None:
        self.halves = halves
        self._done: weakref.ref[DistributedDataParallel] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"halves": self.halves, "_done": None}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(own, fsdp.FSDPModule) for own in module.modules()):
            raise RuntimeError(
                "optimize: fully_shard was called after optimize and replaced the parameters "
                f"that the optimizer updates; {ORDER}"
            )
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        is_training = module.training and torch.is_grad_enabled()
        if wrapper is None or not is_training or (self._done and self._done() is wrapper):
            return
        for low in self.halves.values():
            # No process group knows int16; the same bytes in the same order do.
            memory = formats.in_memory_order(low).view(torch.uint8)
            torch.distributed.broadcast(memory, group=wrapper.process_group, group_src=0)
        self._done = weakref.ref(wrapper)
