"""Perplexity: the losses of a plain run, whatever the windows, and what does not fit."""

from __future__ import annotations

import math

import pytest
import torch
from language_models import build
from torch import Tensor
from torch.nn import functional

from oxytorch import llm
from tiny import tiny_llama

VOCABULARY = 96


@pytest.fixture(scope="module")
def model():
    return tiny_llama(
        3, vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_attention_heads=6,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _window(model, text: Tensor, begin: int, length: int) -> Tensor:
    """Losses of the tokens after each of a window, from one call of the model."""
    logits = model(text[None, begin : begin + length], use_cache=False).logits[0]
    wanted = text[begin + 1 : begin + 1 + length]
    return functional.cross_entropy(logits[: len(wanted)], wanted, reduction="none")


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("batch", [1, 4])
def test_losses_are_those_of_windows_side_by_side(model, text, chunk, batch):
    found = llm.token_losses(model, text, 40, chunk=chunk, batch=batch)
    expected = torch.cat([_window(model, text, begin, 40) for begin in (0, 40, 80, 120)])
    assert found.shape == (149,)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert llm.perplexity(model, text, 40) == pytest.approx(math.exp(expected.mean()), rel=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(40, 13), (40, 39), (64, 1), (37, 37)])
def test_overlapping_windows_count_each_token_once(model, text, window, stride):
    found = llm.token_losses(model, text, window, stride)
    expected = [_window(model, text, 0, window)]
    end, begin = window, stride
    while end < 149:
        losses = _window(model, text, begin, window)
        expected.append(losses[end - begin :])
        end, begin = min(begin + window, 149), begin + stride
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_a_text_within_one_window_is_one_run(model, text):
    found = llm.token_losses(model, text[:20], 64)
    torch.testing.assert_close(found, _window(model, text[:20], 0, 20), rtol=1e-4, atol=1e-4)


def test_progress_counts_windows(model, text):
    told: list[tuple[int, int]] = []
    llm.token_losses(model, text, 40, batch=2, progress=lambda *counts: told.append(counts))
    assert told == [(0, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"window": 65}, "window of at most 64, .* got 65"),
        ({"window": 0}, "window >= 1, got 0"),
        ({"window": 2.5}, "window >= 1, an integer, got 2.5"),
        ({"window": 40, "stride": 41}, "stride 1 to 40, got 41"),
        ({"window": 40, "chunk": 0}, "chunk >= 1, got 0"),
        ({"window": 40, "token_ids": torch.tensor([1])}, r"at least 2 tokens, got .*\[1\]"),
        ({"window": 40, "token_ids": torch.tensor([[1, 2]])}, r"got .*\[1, 2\]"),
        ({"window": 40, "token_ids": torch.tensor([1, VOCABULARY])}, r"\[0, 96\), .* got 96"),
        ({"window": 40, "token_ids": torch.tensor([1, -1, 2])}, "got -1"),
    ],
)
def test_what_does_not_fit_is_refused(model, text, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        llm.token_losses(model, **{"token_ids": text, **arguments})


def test_another_kind_of_model_is_refused(text):
    with pytest.raises(TypeError, match="causal language model"):
        llm.perplexity(torch.nn.Linear(4, 4), text, 8)


def test_logits_that_are_not_finite_are_told(model, text):
    weight = model.lm_head.weight
    with torch.no_grad():
        kept = weight.clone()
        weight[5] = torch.nan
        try:
            with pytest.raises(RuntimeError, match="not finite"):
                llm.perplexity(model, text, 40)
        finally:
            weight.copy_(kept)


def test_layers_that_see_later_tokens_read_a_window_at_once():
    model = build("llama")
    fast = llm.optimize(model, dtype=torch.float32)
    text = torch.randint(3, VOCABULARY, (81,))
    before = llm.token_losses(fast, text, window=80, chunk=16)
    for one in (model, fast):
        for layer in one.model.layers:
            layer.self_attn.is_causal = False
    with torch.no_grad():
        logits = model(text[None, :-1], attention_mask=torch.ones(1, 80)).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, text[1:], reduction="none")
    assert float((before - expected).abs().max()) > 0.1
    for one in (model, fast):
        found = llm.token_losses(one, text, window=80, chunk=16)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
