"""Code that is put in place of a class's or a library's is followed by an optimized model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import assert_follows, build, distance, logits, prompt, tokens
from torch import nn
from torch.nn import functional

from oxytorch import llm

transformers = pytest.importorskip("transformers")

llama = pytest.importorskip("transformers.models.llama.modeling_llama")


def _scaled(result: Any) -> Any:
    if isinstance(result, tuple):
        return (result[0] * 1.3, *result[1:])
    if isinstance(result, torch.Tensor):
        return result * 1.3
    name = "logits" if "logits" in result else "last_hidden_state"
    result[name] = result[name].flip(-1)
    return result


def _around(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces a function by one with another result."""

    def change(patch: pytest.MonkeyPatch) -> None:
        own = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: _scaled(own(*args, **kwargs)))

    return change


def _attention(*args: Any, **kwargs: Any) -> Any:
    own = transformers.integrations.sdpa_attention.sdpa_attention_forward
    return _scaled(own(*args, **kwargs))


def _call(own: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        return _scaled(result) if isinstance(self, nn.Linear) else result

    return call


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    **{
        name: _around(getattr(llama, f"Llama{name}"), "forward")
        for name in (
            "RMSNorm",
            "MLP",
            "Attention",
            "DecoderLayer",
            "RotaryEmbedding",
            "Model",
            "ForCausalLM",
        )
    },
    "Linear": _around(nn.Linear, "forward"),
    "Embedding": _around(nn.Embedding, "forward"),
    "call of a class": lambda patch: patch.setattr(
        llama.LlamaMLP, "__call__", lambda self, x: self.forward(x) * 1.3
    ),
    "call of all": lambda patch: patch.setattr(
        nn.Module, "_call_impl", _call(nn.Module._call_impl)
    ),
    "function of the file": _around(llama, "rotate_half"),
    "linear": _around(functional, "linear"),
    "scaled dot product attention": _around(functional, "scaled_dot_product_attention"),
    "registered attention": lambda patch: patch.setitem(
        llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _attention
    ),
}


def _optimized(
    family: str, **options: Any
) -> tuple[Any, Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model, the same optimized, a prompt, and the logits of it."""
    model: Any = build(family)
    fast: Any = llm.optimize(model, **options)
    given = prompt(1, 12)
    return model, fast, given, logits(fast, given)


@pytest.mark.parametrize("name", CHANGES)
def test_code_put_in_place_of_other_code_is_followed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fast, given, before = _optimized("llama", dtype=torch.float32)
    CHANGES[name](monkeypatch)
    assert_follows(fast, model, given, before)
    monkeypatch.undo()
    for layer in fast.model.layers:
        with torch.no_grad():
            assert layer.__dict__["forward"].standing.allows()
    assert torch.equal(logits(fast, given), before)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_code_replaced_before_the_first_use_of_a_copy_is_followed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fast, given, before = _optimized("llama", dtype=torch.float32)
    copied = copy.deepcopy(fast) if way == "deepcopy" else pickle.loads(pickle.dumps(fast))
    if way == "pickle":
        assert distance(logits(copied, given), before) < 1e-5
    CHANGES["RMSNorm"](monkeypatch)
    assert_follows(copied, model, given, before)
    monkeypatch.undo()
    assert distance(logits(copied, given), before) < 1e-5


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("where", ["class", "module"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_methods_that_a_forward_calls_are_followed(
    where: str, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fast, given, before = _optimized("gemma3", weights=weights)
    usual = distance(before, logits(model, given))
    for one in (model, fast):
        norm = one.model.layers[1].pre_feedforward_layernorm
        if where == "class":
            monkeypatch.setattr(type(norm), "_norm", lambda self, x: x * 2)
        else:
            norm._norm = _twice
    expected = logits(model, given)
    assert distance(before, expected) > 2 * usual + 0.05
    assert distance(logits(fast, given), expected) < 1.5 * usual + 0.01
    found = llm.generate(fast, given["input_ids"], max_new_tokens=8)[:, 12:]
    assert torch.equal(found, tokens(fast, given, max_new_tokens=8))


def test_another_attention_function_is_followed() -> None:
    transformers.AttentionInterface.register("scaled_one", _attention)
    transformers.AttentionMaskInterface.register("scaled_one", _masks())
    model, fast, given, before = _optimized("llama", dtype=torch.float32)
    for one in (model, fast):
        one.set_attn_implementation("scaled_one")
    expected = logits(model, given)
    assert distance(before, expected) > 1e-3
    assert distance(logits(fast, given), expected) < 1e-5


def _masks() -> Any:
    return transformers.masking_utils.sdpa_mask


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_packed_layer_of_a_layer_that_is_not_fused_follows_its_class(
    weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fast, given, before = _optimized("bloom", weights=weights)
    usual = distance(before, logits(model, given))
    CHANGES["Linear"](monkeypatch)
    expected = logits(model, given)
    assert distance(before, expected) > 2 * usual + 0.05
    assert distance(logits(fast, given), expected) < 1.5 * usual + 0.01
