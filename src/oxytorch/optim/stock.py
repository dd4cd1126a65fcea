"""Steps by the class of torch.optim that an optimizer extends, of what no kernel takes."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adagrad
from torch.optim.optimizer import Optimizer

from .batch import Scaling
from .groups import Group
from .split_parameter import SplitParameter

DENSE_ALONE = (
    "sparse gradients are not supported; give these parameters to torch.optim.SparseAdam, "
    "or make their gradients dense, as torch.nn.Embedding(..., sparse=False) does"
)
REAL_ALONE = (
    "complex parameters are not supported; give these to torch.optim.AdamW, "
    "or keep torch.view_as_real of them as parameters"
)


def stock_class(own: type) -> type[Optimizer] | None:
    """The class of torch.optim that `own` extends, or None."""
    return next((candidate for candidate in own.__mro__ if _is_stock(candidate)), None)


def has_formats(group: Group) -> bool:
    """Whether the group asks for formats that torch does not know."""
    return group["master_weights"] is not None or group["state_dtype"] is not None


def step(optimizer: Optimizer, group: Group, scaling: Scaling) -> None:
    """One step of the group by the class of torch.optim that the optimizer extends.

    Raises RuntimeError where there is none, or where it cannot do what the group asks for.
    """
    stock = _checked(type(optimizer), group)
    if scaling.is_left_out:
        return
    for parameter in group["params"]:
        if parameter.grad is not None and scaling.gradient_scale is not None:
            parameter.grad.div_(scaling.gradient_scale.to(parameter.grad.device))
        if parameter.grad is not None and scaling.clip_factor is not None:
            parameter.grad.mul_(scaling.clip_factor.to(parameter.grad.device))
    own_step = vars(stock)["step"]
    if getattr(own_step, "hooked", False):
        own_step = own_step.__wrapped__
    groups = optimizer.param_groups
    hidden = {"found_inf": scaling.found_inf, "grad_scale": scaling.gradient_scale}
    optimizer.__dict__.update(param_groups=[group], found_inf=None, grad_scale=None)
    try:
        own_step(optimizer)
    finally:
        optimizer.__dict__.update(param_groups=groups, **hidden)


def _checked(own: type[Optimizer], group: Group) -> type[Optimizer]:
    name = own.__name__
    if any(type(parameter) is SplitParameter for parameter in group["params"]):
        raise RuntimeError(
            f"{name}: expected dense gradients of split weights and no differentiable steps, "
            "which go torch's way; give optimize a dtype that keeps the module in float32, "
            "as in dtype={'': torch.bfloat16, 'path.to.module': torch.float32}"
        )
    stock = stock_class(own)
    takes_sparse = stock is not None and issubclass(stock, (SGD, Adagrad))
    with_gradients = [p for p in group["params"] if p.grad is not None]
    if not takes_sparse and any(p.grad.layout is not torch.strided for p in with_gradients):
        raise RuntimeError(f"{name}: {DENSE_ALONE}")
    if stock is None and any(p.is_complex() for p in with_gradients):
        raise RuntimeError(f"{name}: {REAL_ALONE}")
    if stock is None:
        raise RuntimeError(
            f"{name}: torch has no optimizer of this kind, which differentiable steps would need; "
            "set differentiable=False, or use torch.optim.AdamW"
        )
    if has_formats(group):
        raise RuntimeError(
            f"{name}: sparse gradients, complex parameters and differentiable steps go "
            "torch's way, which knows neither master_weights nor state_dtype; "
            "put these parameters into a group that sets both to None"
        )
    return stock


def _is_stock(candidate: type) -> bool:
    """Whether it is an optimizer of torch.optim with a step of its own."""
    return (
        candidate is not Optimizer
        and candidate.__module__.startswith("torch.optim.")
        and "step" in vars(candidate)
    )
