"""Models trained by several processes: what `optimize` refuses."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..optim import sharding

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
        if sharding.is_sharded(parameter):
            raise ValueError(
                f"optimize: expected no dtype for a model with sharded parameters, got {dtype} "
                f"and the DTensor {name}; for bfloat16 computation give fully_shard a "
                "MixedPrecisionPolicy, for bfloat16 weights see master_weights='split' of "
                "oxytorch.optim"
            )


def refuse_sharding(module: nn.Module, inputs: Any) -> None:
    """Called before each forward of a model that is trained with split weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(own, fsdp.FSDPModule) for own in module.modules()):
        raise RuntimeError(
            "optimize: fully_shard was called after optimize and replaced the parameters "
            f"that the optimizer updates; {ORDER}"
        )
