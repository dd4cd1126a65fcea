"""Gradients of split weights: torch.autograd.grad, higher orders, and gradients in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch import optim
from split_models import network, pair, step, weights

pytestmark = pytest.mark.usefixtures("pack_small_layers")


def test_gradients_of_functions_of_weights() -> None:
    model, _ = pair()
    plain = nn.Parameter(weights(model)["head.weight"])
    results = []
    for weight in (model.head.weight, plain):
        (first,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad((first * weight.detach()).sum(), [weight])
        results.append((first, second))
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own.float(), other, rtol=0.02, atol=1e-3)
    jacobian = torch.autograd.functional.jacobian(lambda w: w.pow(2).sum(), model.head.weight)
    assert torch.equal(jacobian, 2 * plain.detach())


def test_gradients_of_a_loss_are_those_of_backward() -> None:
    model, _ = pair()
    x = torch.randn(4, 6)
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(model(x).float().square().sum(), parameters)
    model(x).float().square().sum().backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_second_order_is_that_of_the_plain_model() -> None:
    """A product with the Hessian, and a penalty on gradients."""
    model, _ = pair()
    twin = network()
    x = torch.randn(4, 6)
    products = []
    for own in (model, twin):
        parameters = [*own.parameters()]
        loss = own(x).float().square().sum()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum(gradient.float().square().sum() for gradient in gradients)
        products.append(torch.autograd.grad(penalty, parameters))
    scale = max(product.abs().max().item() for product in products[1])
    for first, second in zip(*products, strict=True):
        torch.testing.assert_close(first.float(), second, rtol=0.1, atol=0.05 * scale)


def test_weights_after_an_inner_step_are_float32() -> None:
    """As in MAML: the gradient goes through the step to the weight."""
    model, _ = pair()
    x, parameters = torch.randn(4, 6), dict(model.named_parameters())
    loss = model(x).float().square().mean()
    gradients = torch.autograd.grad(loss, [*parameters.values()], create_graph=True)
    pairs = zip(parameters.items(), gradients, strict=True)
    fast = {name: weight - 0.01 * gradient for (name, weight), gradient in pairs}
    assert {weight.dtype for weight in fast.values()} == {torch.float32}
    for (name, weight), gradient in zip(parameters.items(), gradients, strict=True):
        wanted = weight.detach().clone() - (0.01 * gradient.detach()).float()
        assert torch.equal(fast[name].detach(), wanted), name
    torch.func.functional_call(model, fast, x).float().square().mean().backward()
    assert all(weight.grad is not None for weight in parameters.values())


def test_hooks_over_several_gradients_are_called() -> None:
    model, _ = pair()
    seen: list[Any] = []
    parameters = [*model.parameters()]
    torch.autograd.graph.register_multi_grad_hook(parameters, seen.append)
    model(torch.randn(4, 6)).float().sum().backward()
    (gradients,) = seen
    pairs = zip(parameters, gradients, strict=True)
    assert all(torch.equal(own.grad, gradient) for own, gradient in pairs)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Lamb"])
def test_gradients_in_float32_are_taken_as_they_are(name: str) -> None:
    """Their bits count, as for plain weights, and backward adds to them."""
    twins = []
    for dtype in (torch.bfloat16, None):
        model = network()
        optimizer = getattr(optim, name)(model.parameters(), lr=1e-2)
        model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=dtype, inplace=True)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad
                assert gradient.dtype == torch.float32
                gradient.add_(torch.randn(parameter.shape, generator=generator))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        twins.append(model)
    wanted = weights(twins[1])
    for key, value in weights(twins[0]).items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-6, atol=1e-7)


def test_backward_adds_to_a_gradient_in_float32() -> None:
    model, optimizer = pair()
    x = torch.randn(4, 6)
    model(x).float().sum().backward()
    wanted = model.head.weight.grad.float() + 1
    model.head.weight.grad = torch.ones(3, 8)
    kept = model.head.weight.grad
    model(x).float().sum().backward()
    assert model.head.weight.grad is kept
    assert torch.equal(kept, wanted)
    optimizer.step()
    optimizer.zero_grad()
    model(x).float().sum().backward()
    assert model.head.weight.grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"shape|size"):
        model.head.weight.grad = torch.ones(5)


def test_gradients_are_written_back_from_one_vector() -> None:
    model, optimizer = pair()
    step(model)
    vector = torch.cat([p.grad.flatten().float() for p in model.parameters()]) / 3
    place = 0
    for parameter in model.parameters():
        gradient = vector[place : place + parameter.numel()].view_as(parameter)
        parameter.grad = gradient
        assert parameter.grad.data_ptr() == gradient.data_ptr()
        place += parameter.numel()
    before = weights(model)
    optimizer.step()
    after = model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
