"""Gradients of every order and kind are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .compare import Log
from .models import MODELS, cases
from .registers import into

FLOATING = [name for name in MODELS if name not in ("tied", "bag")]
Kind = Callable[[Any, torch.Tensor, Log], None]
KINDS_OF_GRADIENT: dict[str, Kind] = {}

kind = into(KINDS_OF_GRADIENT)
"""Registers one way of asking for derivatives."""


def _out(model: Any, x: torch.Tensor) -> torch.Tensor:
    result = model(x)
    return result[0] if isinstance(result, tuple) else result


def _grads(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


@kind
def _of_inputs_and_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    x = x.requires_grad_()
    _out(model, x).pow(2).sum().backward()
    log(x.grad, _grads(model))


@kind
def _of_weights_only(model: Any, x: torch.Tensor, log: Log) -> None:
    _out(model, x).pow(2).sum().backward()
    log(_grads(model))


@kind
def _of_inputs_with_frozen_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    model.requires_grad_(False)
    x = x.requires_grad_()
    _out(model, x).pow(2).sum().backward()
    log(x.grad, _grads(model))


@kind
def _frozen_and_plain_input(model: Any, x: torch.Tensor, log: Log) -> None:
    model.requires_grad_(False)
    result = _out(model, x)
    log(result, result.grad_fn is None)


@kind
def _partly_frozen(model: Any, x: torch.Tensor, log: Log) -> None:
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
    _out(model, x).sum().backward()
    log(_grads(model))


@kind
def _only_bias_trained(model: Any, x: torch.Tensor, log: Log) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    result = _out(model, x)
    if result.requires_grad:
        result.sum().backward()
    log(_grads(model))


@kind
def _unfrozen_later(model: Any, x: torch.Tensor, log: Log) -> None:
    model.requires_grad_(False)
    log(_out(model, x), _out(model, x))
    model.requires_grad_(True)
    _out(model, x).sum().backward()
    log(_grads(model))


@kind
def _accumulated(model: Any, x: torch.Tensor, log: Log) -> None:
    for factor in (1.0, 0.5):
        (_out(model, x * factor).pow(2).sum() / 2).backward()
    log(_grads(model))


@kind
def _retained_graph(model: Any, x: torch.Tensor, log: Log) -> None:
    loss = _out(model, x.requires_grad_()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    log(x.grad, _grads(model))


@kind
def _of_intermediate(model: Any, x: torch.Tensor, log: Log) -> None:
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            out.retain_grad()
            seen.append(out)

    handles = [m.register_forward_hook(keep) for m in model.modules()]
    _out(model, x.requires_grad_()).sum().backward()
    for handle in handles:
        handle.remove()
    log([h.grad for h in seen])


@kind
def _gradient_penalty(model: Any, x: torch.Tensor, log: Log) -> None:
    x = x.requires_grad_()
    (g,) = torch.autograd.grad((_out(model, x) ** 2).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    log(g, x.grad, _grads(model))


@kind
def _double_backward_of_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    parameters = [*model.parameters()]
    grads = torch.autograd.grad(
        _out(model, x).pow(2).sum(), parameters, create_graph=True, allow_unused=True
    )
    total = sum(g.pow(2).sum() for g in grads if g is not None)
    log(torch.autograd.grad(total, parameters, allow_unused=True))


@kind
def _hessian(model: Any, x: torch.Tensor, log: Log) -> None:
    flat = x.reshape(-1)[:4].clone()

    def scalar(part: torch.Tensor) -> torch.Tensor:
        full = torch.cat([part, x.reshape(-1)[4:]]).view_as(x)
        return _out(model, full).pow(2).sum()

    log(torch.autograd.functional.hessian(scalar, flat))
    log(torch.autograd.functional.hvp(scalar, flat, torch.ones(4)))


@kind
def _jacobian(model: Any, x: torch.Tensor, log: Log) -> None:
    log(torch.autograd.functional.jacobian(lambda v: _out(model, v), x[:1]))


@kind
def _grad_none_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    model.zero_grad(set_to_none=False)
    _out(model, x).sum().backward()
    model.zero_grad()
    log(_grads(model))


@kind
def _detect_anomaly(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        _out(model, x.requires_grad_()).sum().backward()
    log(x.grad, _grads(model))


@kind
def _under_no_grad_then_with(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        log(_out(model, x), _out(model, x).requires_grad)
        with torch.enable_grad():
            log(_out(model, x))
    with torch.inference_mode():
        log(_out(model, x).is_inference())
    with torch.set_grad_enabled(False):
        log(_out(model, x.requires_grad_()))
    log(_out(model, x))


@kind
def _inference_tensor_given(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.inference_mode():
        y = x * 1
        log(_out(model, y).clone())
    with torch.no_grad():
        log(_out(model, y))
    log(_out(model, y))


@kind
def _saved_tensor_hooks(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        loss = _out(model, x.requires_grad_()).pow(2).sum()
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        _out(model, x).pow(2).sum().backward()
    log(x.grad, _grads(model))


@kind
def _parameter_hooks(model: Any, x: torch.Tensor, log: Log) -> None:
    sizes: list[int] = []
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p: sizes.append(p.numel()))
    _out(model, x).sum().backward()
    log(_grads(model), sorted(sizes))


@kind
def _checkpointed(model: Any, x: torch.Tensor, log: Log) -> None:
    checkpoint(lambda v: _out(model, v), x.requires_grad_(), use_reentrant=False).sum().backward()
    log(x.grad, _grads(model))


@kind
def _checkpointed_reentrant(model: Any, x: torch.Tensor, log: Log) -> None:
    checkpoint(lambda v: _out(model, v), x.requires_grad_(), use_reentrant=True).sum().backward()
    log(x.grad, _grads(model))


@kind
def _checkpointed_sequentially(model: Any, x: torch.Tensor, log: Log) -> None:
    if isinstance(model, nn.Sequential):
        checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=False).sum().backward()
        log(x.grad, _grads(model))


@kind
def _training_mode(model: Any, x: torch.Tensor, log: Log) -> None:
    model.train()
    torch.manual_seed(4)
    _out(model, x.requires_grad_()).pow(2).sum().backward()
    log(x.grad, _grads(model), model.state_dict())


@kind
def _func_grad(model: Any, x: torch.Tensor, log: Log) -> None:
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(values: Any, v: torch.Tensor) -> torch.Tensor:
        result = torch.func.functional_call(model, values, (v,))
        return (result[0] if isinstance(result, tuple) else result).pow(2).sum()

    log(torch.func.grad(loss)(parameters, x))
    log(torch.func.grad(loss, argnums=1)(parameters, x))
    log(torch.func.grad_and_value(loss)(parameters, x))


@kind
def _func_grad_of_inputs(model: Any, x: torch.Tensor, log: Log) -> None:
    log(torch.func.grad(lambda v: _out(model, v).pow(2).sum())(x))
    log(torch.func.grad(torch.func.grad(lambda s: _out(model, x * s).pow(2).sum()))(torch.ones(())))


@kind
def _func_vjp_jvp(model: Any, x: torch.Tensor, log: Log) -> None:
    out, pull = torch.func.vjp(lambda v: _out(model, v), x)
    log(out, pull(torch.ones_like(out)))
    log(torch.func.jvp(lambda v: _out(model, v), (x,), (torch.ones_like(x),)))


@kind
def _func_jacrev(model: Any, x: torch.Tensor, log: Log) -> None:
    log(torch.func.jacrev(lambda v: _out(model, v))(x[:1]))


@kind
def _func_jacfwd(model: Any, x: torch.Tensor, log: Log) -> None:
    log(torch.func.jacfwd(lambda v: _out(model, v))(x[:1]))


@kind
def _func_linearize(model: Any, x: torch.Tensor, log: Log) -> None:
    out, linear = torch.func.linearize(lambda v: _out(model, v), x)
    log(out, linear(torch.ones_like(x)))


@kind
def _func_vmap(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        log(torch.func.vmap(lambda v: _out(model, v))(torch.stack([x, x * 2])))


@kind
def _func_per_sample_gradients(model: Any, x: torch.Tensor, log: Log) -> None:
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(values: Any, v: torch.Tensor) -> torch.Tensor:
        result = torch.func.functional_call(model, values, (v[None],))
        return (result[0] if isinstance(result, tuple) else result).pow(2).sum()

    log(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x))


@kind
def _func_ensemble(model: Any, x: torch.Tensor, log: Log) -> None:
    stacked = {k: torch.stack([v.detach(), v.detach() * 0.5]) for k, v in model.named_parameters()}

    def call(values: Any) -> torch.Tensor:
        result = torch.func.functional_call(model, values, (x,))
        return result[0] if isinstance(result, tuple) else result

    with torch.no_grad():
        log(torch.func.vmap(call)(stacked))


@kind
def _functional_call(model: Any, x: torch.Tensor, log: Log) -> None:
    values = {k: v.detach() * 0.5 for k, v in model.named_parameters()}
    with torch.no_grad():
        log(_out(model, x))
        log(torch.func.functional_call(model, values, (x,)))
        log(_out(model, x))
        log(torch.func.functional_call(model, values, (x,)))
    values = {k: v.requires_grad_() for k, v in values.items()}
    result = torch.func.functional_call(model, values, (x,))
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    log([v.grad for v in values.values()])


@kind
def _functionalize(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        log(torch.func.functionalize(lambda v: _out(model, v))(x))


@kind
def _forward_mode(model: Any, x: torch.Tensor, log: Log) -> None:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        log(forward_ad.unpack_dual(_out(model, dual)).tangent)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        log(forward_ad.unpack_dual(_out(model, dual)).tangent)


@kind
def _batched_gradients(model: Any, x: torch.Tensor, log: Log) -> None:
    out = _out(model, x.requires_grad_())
    directions = torch.stack([torch.ones_like(out), out.detach()])
    log(torch.autograd.grad(out, x, directions, is_grads_batched=True))


SMALL = ("linear", "conv2d_norm", "lstm", "gated", "encoder", "images")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["default", pytest.param("sample", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "way"), cases(FLOATING, KINDS_OF_GRADIENT, SMALL))
def test_gradient(check: Callable[..., None], name: str, way: str, form: str) -> None:
    build, sample, own_form = MODELS[name]

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            log(_out(model, sample()), _out(model, sample()))
        KINDS_OF_GRADIENT[way](model, sample(), log)
        with torch.no_grad():
            log(_out(model.eval(), sample()))

    used = own_form if form == "default" else form
    check(build, use, used, sample, tolerance=3e-5)
