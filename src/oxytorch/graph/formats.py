"""The order in memory of what convolutions return.

oneDNN's kernels give channels-last order, and from one to the next nothing else should be made of
it. Torch's own convolutions keep the order of their input, and code may rely on that (`view`). So
the channels-last order stays within a call of the whole model, whose outputs are put in torch's
order; a model whose code does not bear it gets torch's order from every convolution.
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.modes import is_plain_inference
from .code import is_constant
from .forward import Forward


class _Local(threading.local):
    is_free = False


_local = _Local()
_is_training = attrgetter("training")


def order_is_free() -> bool:
    """Whether the code around a convolution may be given results in any order."""
    return _local.is_free


def kept(result: Tensor, x: Tensor) -> Tensor:
    """The result of a convolution of x, in the order that the code around it may be given."""
    return result if _local.is_free or is_last(x) else result.contiguous()


def is_last(x: Tensor) -> bool:
    """Whether a tensor is in channels-last order and in no other."""
    if x.is_contiguous():
        return False
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)


class _Opaque(Exception):
    """An output in which tensors may be hidden."""


class ModelForward(Forward):
    """The forward of a model in which convolutions may keep channels-last order.

    is_free: whether they may; not any more once a call failed or returned what cannot be looked
    into.
    """

    def __init__(self, module: nn.Module, is_free: bool) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", self.own)
        self.is_free = is_free
        self._modules = [*module.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Random numbers of dropout would fall on other values in another order.
        bears = self.is_free and is_plain_inference() and not any(map(_is_training, self._modules))
        if not bears or _local.is_free:
            return self.inner(*args, **kwargs)
        _local.is_free = True
        try:
            result = self.inner(*args, **kwargs)
            if any(map(is_last, _tensors((args, kwargs)))):
                return result
            return pytree.tree_map(_in_torchs_order, result)
        except (RuntimeError, _Opaque):
            # Without the other order the model's code either runs or says itself what is wrong.
            self.is_free = False
        finally:
            _local.is_free = False
        return self.inner(*args, **kwargs)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def has_other_order(x: Tensor) -> bool:
    """Whether a tensor may be in the order that convolutions of ours return."""
    is_turned = x.dim() == 3 and not x.is_contiguous() and x.mT.is_contiguous()
    return is_turned or is_last(x)


def _in_torchs_order(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.contiguous() if has_other_order(leaf) else leaf
    if is_constant(leaf):
        return leaf
    raise _Opaque(type(leaf).__name__)
