"""A step of several sequences gives each what a step of its own gives."""

from __future__ import annotations

import pytest
import torch
from language_models import FAMILIES, VOCABULARY, build
from torch import Tensor

import oxytorch
from oxytorch import llm
from oxytorch.llm.cache import KVCache
from oxytorch.llm.joint_steps import can_join, exact_rows, joint_step
from oxytorch.llm.record import FusedModel, fused_model

LENGTHS = (3, 17, 1, 30, 8, 64, 9, 25)


def fused(family: str, dtype: torch.dtype, **options: str | int) -> FusedModel:
    found = fused_model(llm.optimize(build(family), dtype=dtype, **options))
    assert found is not None
    return found


def both(model: FusedModel) -> tuple[Tensor, Tensor]:
    """Logits of two joint steps, and of the same steps one by one."""
    torch.manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (len(LENGTHS), 70))
    joint: list[KVCache] = []
    single: list[KVCache] = []
    for caches in (joint, single):
        for row, length in enumerate(LENGTHS):
            caches.append(model.cache(1, 80))
            model.step(tokens[row : row + 1, :length], caches[-1])
    found, wanted = [], []
    for step in (68, 69):
        column = tokens[:, step : step + 1]
        found.append(joint_step(model, column, joint))
        rows = [model.step(column[row : row + 1], cache) for row, cache in enumerate(single)]
        wanted.append(torch.cat(rows))
    assert [cache.length for cache in joint] == [length + 2 for length in LENGTHS]
    return torch.cat(found), torch.cat(wanted)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_joint_step_gives_the_logits_of_each_family(family: str) -> None:
    model = fused_model(llm.optimize(build(family), dtype=torch.float32))
    if model is None:
        pytest.skip(f"{family} is not known as a whole")
    if not can_join(model):
        pytest.skip(f"{family}: angles depend on the longest position")
    found, wanted = both(model)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("kv_cache", ["bf16", "int8"])
@torch.inference_mode()
def test_eight_rows_in_bfloat16_are_rounded_as_one(weights: str | None, kv_cache: str) -> None:
    if weights is None and oxytorch.isa.active() == "amx":
        pytest.skip("AMX rounds several rows of plain bfloat16 in another way than one")
    options = {"weights": weights, "kv_cache": kv_cache, "group_size": 32}
    found, wanted = both(fused("llama", torch.bfloat16, **options))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("weights", [None, "int8"])
@torch.inference_mode()
def test_exact_rows_are_a_number_of_rows_that_round_alike(weights: str | None) -> None:
    model = fused("llama", torch.bfloat16, weights=weights, group_size=32)
    rows = exact_rows(model, VOCABULARY, 8)
    assert rows in (1, 2, 4, 8)
    if weights is not None:
        assert rows == 8


@torch.inference_mode()
def test_prompt_in_parts_is_the_prompt() -> None:
    model = fused("llama", torch.bfloat16, weights="int8")
    tokens = torch.randint(1, VOCABULARY, (1, 200))
    whole = model.step(tokens, model.cache(1, 200))
    for part in (32, 64, 100, 168):
        cache = model.cache(1, 200)
        for piece in tokens.split(part, 1):
            if piece.shape[1] < 32:  # few rows may be rounded in another way
                break
            logits = model.step(piece, cache)
        else:
            assert torch.equal(logits, whole)
