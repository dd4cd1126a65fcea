"""The order in memory of what convolutions return.

oneDNN's kernels give channels-last order, and from one to the next nothing else should be made of
it. Torch's own convolutions keep the order of their input, and code may rely on that (`view`). So
the channels-last order stays within a call of the whole model, whose outputs are put in torch's
order; a model whose code does not bear it gets torch's order from every convolution.
"""

from __future__ import annotations

import threading
from itertools import pairwise
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

    is_free: whether they may in a call with inputs in torch's order.
    is_free_last: in a call with an input in channels-last order. Not any more once a call failed or
        returned what cannot be looked into.
    """

    def __init__(self, module: nn.Module, is_free: bool, is_free_last: bool) -> None:
        super().__init__(module)
        self.inner = module.__dict__.get("forward", self.own)
        self.is_free = is_free
        self.is_free_last = is_free_last
        self._modules = [*module.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Random numbers of dropout would fall on other values in another order.
        may = (self.is_free or self.is_free_last) and not _local.is_free
        bears = may and is_plain_inference() and not any(map(_is_training, self._modules))
        is_given_last = bears and any(map(is_last, _tensors((args, kwargs))))
        if not bears or not (self.is_free_last if is_given_last else self.is_free):
            return self.inner(*args, **kwargs)
        _local.is_free = True
        try:
            result = self.inner(*args, **kwargs)
            if is_given_last:
                return result
            return pytree.tree_map(_in_torchs_order, result)
        except (RuntimeError, _Opaque):
            # Without the other order the model's code either runs or says itself what is wrong.
            self.is_free = self.is_free_last = False
        finally:
            _local.is_free = False
        return self.inner(*args, **kwargs)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def has_other_order(x: Tensor) -> bool:
    """Whether a tensor may be of the order that convolutions of ours return: a part or a view of
    such a one as well."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return any(before < after for before, after in pairwise(filter(None, strides)))


def _in_torchs_order(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        is_strided = leaf.layout == torch.strided
        return leaf.contiguous() if is_strided and has_other_order(leaf) else leaf
    if is_constant(leaf):
        return leaf
    raise _Opaque(type(leaf).__name__)
