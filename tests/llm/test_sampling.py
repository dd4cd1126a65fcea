"""Draws: the distribution of Hugging Face's processors, and the frequencies that it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxytorch.llm.sampling import Sampler

transformers = pytest.importorskip("transformers")


def _stock(logits: Tensor, temperature, top_k, top_p) -> Tensor:
    """Probabilities [batch, vocabulary] by transformers' processors."""
    steps = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        steps.append(transformers.TopKLogitsWarper(top_k))
    if top_p is not None:
        steps.append(transformers.TopPLogitsWarper(top_p))
    scores = logits
    for step in steps:
        scores = step(torch.empty(len(logits), 0, dtype=torch.int64), scores)
    return torch.softmax(scores, -1)


def _ours(logits: Tensor, temperature, top_k, top_p) -> Tensor:
    probabilities, tokens = Sampler(temperature, top_k, top_p).candidates(logits)
    if tokens is None:
        return probabilities
    return torch.zeros_like(logits).scatter_(1, tokens, probabilities)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([3, 50, 513, 2000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([None, 1, 7, 40, 5000]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.93, 1.0]),
)
def test_candidates_have_the_probabilities_of_transformers(seed, size, temperature, top_k, top_p):
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 4
    found = _ours(logits, temperature, top_k, top_p)
    expected = _stock(logits, temperature, top_k, top_p)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_flat_logits_look_beyond_the_first_candidates():
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)) * 0.01
    found = _ours(logits, 1.0, None, 0.9)
    assert 3500 < int((found > 0).sum()) < 3700
    torch.testing.assert_close(found, _stock(logits, 1.0, None, 0.9), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, None), (None, 0.8), (6, 0.9)])
def test_draws_have_the_frequencies_of_their_probabilities(top_k, top_p):
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5, 0.0, -0.5, 1.5, -3.0]])
    count = 20000
    sampler = Sampler(0.8, top_k, top_p, seed=1)
    drawn = sampler(logits.expand(count, -1))
    frequencies = torch.bincount(drawn, minlength=8) / count
    expected = _stock(logits, 0.8, top_k, top_p)[0]
    # Five standard deviations of the frequency of a draw.
    allowed = 5 * (expected * (1 - expected) / count).sqrt()
    assert bool(((frequencies - expected).abs() <= allowed + 1e-9).all()), (frequencies, expected)


@pytest.mark.parametrize("temperature", [1e-4, 1e-37, 1e-45, 1e-300])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_temperature_near_zero_is_greedy(temperature, top_p):
    logits = torch.randn(4, 300)
    found = Sampler(temperature, top_p=top_p, seed=0)(100 * logits)
    assert torch.equal(found, logits.argmax(-1))
    assert torch.equal(Sampler()(logits.bfloat16()), logits.bfloat16().float().argmax(-1))
