"""Gradients of optimized models, and what is trained afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import VOCABULARY, build, distance, logits, prompt, tokens
from torch import nn

import oxytorch
from oxytorch import llm

pytest.importorskip("transformers")

TEXT = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model(TEXT, labels=TEXT).loss.backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "falcon_grouped"])
@pytest.mark.parametrize(
    ("dtype", "weights", "allowed"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.05), (torch.bfloat16, "int8", 0.15)],
)
def test_gradients_are_those_of_the_model(
    family: str, dtype: torch.dtype, weights: str | None, allowed: float, inplace: bool
) -> None:
    expected = _gradients(build(family).to(dtype))
    fast: Any = llm.optimize(build(family), dtype=dtype, weights=weights, inplace=inplace)
    found = _gradients(fast)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert distance(gradient, expected[name]) < allowed, name


def test_parameters_ask_for_gradients_as_before() -> None:
    model: Any = build("llama")
    frozen = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for weights in (None, "int8", "int4"):
        fast = llm.optimize(model, weights=weights, group_size=64)
        asking = {name for name, p in fast.named_parameters() if not p.requires_grad}
        assert asking == frozen
        assert all(p.requires_grad == (n not in frozen) for n, p in model.named_parameters())
        oxytorch.undo(fast)
        assert {name for name, p in fast.named_parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_fused_all_the_same(mode: Any) -> None:
    fast: Any = llm.optimize(build("llama"))
    assert all(p.requires_grad for p in fast.parameters())
    with mode():
        for layer in fast.model.layers:
            assert layer.__dict__["forward"].standing.allows(torch.zeros(1, 1, 64))
    for parameter in fast.parameters():
        parameter.requires_grad_(False)
    assert fast.model.layers[0].__dict__["forward"].standing.allows(torch.zeros(1, 1, 64))


def _train(model: Any, steps: int = 5) -> Any:
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TEXT, labels=TEXT).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_what_was_trained_is_used(family: str, dtype: torch.dtype, allowed: float) -> None:
    model: Any = build(family)
    fast: Any = llm.optimize(model, dtype=dtype)
    given = prompt(1, 12)
    before = logits(model, given)
    llm.generate(fast, given["input_ids"], max_new_tokens=16)
    for one in (model, fast):
        _train(one)
    expected = logits(model, given)
    assert distance(before, expected) > 3 * allowed
    assert distance(logits(fast, given), expected) < allowed
    found = llm.generate(fast, given["input_ids"], max_new_tokens=8)[:, 12:]
    assert torch.equal(found, tokens(fast, given, max_new_tokens=8))
    if dtype == torch.float32:
        assert torch.equal(found, tokens(model, given, max_new_tokens=8))


def test_an_adapter_is_trained_beside_frozen_weights() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.full((4, 64), 0.02))
            self.b = nn.Parameter(torch.full((64, 4), 0.02))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
            return result

    model: Any = build("llama")
    fast: Any = llm.optimize(model, dtype=torch.float32)
    for one in (model, fast):
        one.requires_grad_(False)
        attention = one.model.layers[0].self_attn
        attention.q_proj = Adapter(attention.q_proj)
        _train(one)
    adapters = [one.model.layers[0].self_attn.q_proj for one in (model, fast)]
    torch.testing.assert_close(adapters[1].a, adapters[0].a)
    assert not torch.equal(adapters[1].a, torch.full((4, 64), 0.02))
    given = prompt(1, 12)
    assert distance(logits(fast, given), logits(model, given)) < 1e-5


def test_a_tied_head_alone_has_a_gradient() -> None:
    model: Any = build("gemma3")
    fast: Any = llm.optimize(model)
    states = torch.randn(2, 9, 64)
    found = []
    for one in (model, fast):
        one.requires_grad_(False)
        weight = one.get_input_embeddings().weight.requires_grad_()
        embedded = states.to(weight.dtype)
        one(inputs_embeds=embedded, labels=TEXT).loss.backward()
        found.append(weight.grad.float())
    assert distance(found[1], found[0]) < 0.05


def test_a_prefix_is_trained_before_frozen_weights() -> None:
    """As in PEFT's prefix tuning: gradients are those of the keys and values of a cache."""
    from transformers import DynamicCache

    def trained(model: Any) -> list[torch.Tensor]:
        model.requires_grad_(False)
        config = model.config
        generator = torch.Generator().manual_seed(7)
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        count = 2 * config.num_hidden_layers
        prefix = [torch.randn(2, heads, 3, size, generator=generator) for _ in range(count)]
        for part in prefix:
            part.requires_grad_()
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
        result = model(TEXT, past_key_values=cache)
        result.logits.pow(2).mean().backward()
        with torch.no_grad():
            again = DynamicCache(config=config)
            for layer in range(config.num_hidden_layers):
                again.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
            plain = model(TEXT, past_key_values=again).logits
        return [result.logits.detach(), plain, *(part.grad for part in prefix)]  # type: ignore[list-item]

    expected = trained(build("llama"))
    found = trained(llm.optimize(build("llama"), dtype=torch.float32))
    for own, other in zip(expected, found, strict=True):
        assert distance(other, own) < 1e-5
