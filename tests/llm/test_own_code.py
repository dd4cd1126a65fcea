"""Calls that run the layers' own code: what they return, and that weights are restored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import build, distance, prompt
from torch import Tensor

from oxytorch import llm
from oxytorch.core.packed import PackedTensor

transformers = pytest.importorskip("transformers")


class Counted(transformers.DynamicCache):  # type: ignore[misc,name-defined]
    """A cache of a class of the user's own."""


def _attentions(model: Any, given: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return model(**given, output_attentions=True).logits


def _own_cache(model: Any, given: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return model(**given, past_key_values=Counted()).logits


def _gradients(model: Any, given: dict[str, Tensor]) -> Any:
    return model(**given).logits.detach()


def _hidden_states(model: Any, given: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return torch.stack(model(**given, output_hidden_states=True).hidden_states)


_FAMILIES = [
    "llama",
    "phi3",
    "gpt_neox",
    "falcon_grouped",
    "gpt2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
]
_CALLS = [_attentions, _own_cache, _gradients, _hidden_states]


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_weights_are_restored_once_for_calls_of_own_code(
    family: str, call: Callable[..., Any], weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm.optimize(build(family), weights=weights)
    given = prompt(1)
    for _ in range(2):
        call(model, given)
    restored: list[type] = []
    real = PackedTensor._restored

    def counted(weight: PackedTensor) -> Tensor:
        restored.append(type(weight))
        return real(weight)

    monkeypatch.setattr(PackedTensor, "_restored", counted)
    for _ in range(2):
        call(model, given)
    assert restored == []


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.__name__)
def test_answers_of_own_code_are_the_models_own(family: str, call: Callable[..., Any]) -> None:
    model = build(family)
    given = prompt(1)
    fast = llm.optimize(model, dtype=torch.float32)
    for _ in range(2):
        assert distance(call(fast, given), call(model, given)) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_hidden_states_come_from_the_fused_layers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    fast = llm.optimize(model, dtype=torch.float32)
    kind = type(model.model.layers[0].self_attn)
    given = prompt(1)
    expected = _hidden_states(model, given)
    own: list[Any] = []
    real = llm.layer.DecoderLayer.step

    def noted(self: Any, *args: Any, **named: Any) -> Tensor:
        own.append(kind)
        return real(self, *args, **named)

    monkeypatch.setattr(llm.layer.DecoderLayer, "step", noted)
    assert distance(_hidden_states(fast, given), expected) < 1e-5
    assert len(own) == 2


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("read", ["gradients", "a view", "a copy"])
def test_who_reads_a_packed_head_leaves_the_embedding_as_it_is(weights: str, read: str) -> None:
    model = llm.optimize(build("gemma3"), weights=weights, group_size=32)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    given = prompt(1)
    for _ in range(2):
        if read == "gradients":
            model(**given)
        view = model.lm_head.weight[0] if read == "a view" else model.lm_head.weight.clone()
        with torch.no_grad():
            model(**given)
    assert torch.equal(embedding, before)
    if read == "a view":
        with torch.no_grad():
            view.fill_(0.5)
            model(**given)
        assert torch.equal(embedding[0], view)
