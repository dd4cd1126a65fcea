"""A step of several sequences gives each what a step of its own gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from language_models import FAMILIES, VOCABULARY, build
from torch import Tensor

import oxytorch
from oxytorch import llm
from oxytorch.llm.joint_steps import can_join, exact_rows, joint_step, most_alike_rows
from oxytorch.llm.record import FusedModel, fused_model

LENGTHS = (3, 17, 1, 30, 8, 64, 9, 25)
LEVELS = [each.name for each in oxytorch.isa.levels() if each.supported and each.name != "generic"]


def fused(family: str, dtype: torch.dtype, **options: str | int | None) -> FusedModel:
    found = fused_model(llm.optimize(build(family), dtype=dtype, **options))
    assert found is not None
    return found


def both(model: FusedModel, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Logits of two joint steps, and of the same steps one by one."""
    torch.manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), 70))
    joint = model.slots(len(lengths) + 2, 80)
    rows = torch.randperm(len(lengths) + 2)[: len(lengths)].tolist()
    single = [model.cache(1, 80) for _ in lengths]
    for row, length in enumerate(lengths):
        for cache in (joint.slots[rows[row]], single[row]):
            model.step(tokens[row : row + 1, :length], cache)
    found, wanted = [], []
    for step in (68, 69):
        column = tokens[:, step : step + 1]
        found.append(joint_step(model, column, joint, rows))
        each = [model.step(column[row : row + 1], cache) for row, cache in enumerate(single)]
        wanted.append(torch.cat(each))
    assert [joint.slots[row].length for row in rows] == [length + 2 for length in lengths]
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activations", ["int8", None])
@pytest.mark.parametrize(
    ("weights", "group_size"), [("int8", None), ("int4", 32), ("int4", 64), ("int4", None)]
)
@torch.inference_mode()
def test_many_rows_round_as_one_where_sums_are_integers(
    weights: str, group_size: int | None, activations: str | None, level: str
) -> None:
    with oxytorch.isa.use(level):
        options = {"weights": weights, "group_size": group_size, "activation_dtype": activations}
        model = fused("llama", torch.bfloat16, **options)
        if activations is None and not oxytorch.isa.has("int8_dot"):
            assert most_alike_rows(model) == 8
            found, wanted = both(model)
            assert torch.equal(found, wanted)
            return
        most = most_alike_rows(model)
        if activations is None:
            assert most == (8 if group_size == 32 else 32)
        else:
            assert most > 1000
        for count in (7, min(most, 15), min(most, 40)):
            found, wanted = both(model, (LENGTHS * 5)[:count])
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "nf4"}, {"weights": "int4", "activation_dtype": "int8", "head": "bf16"}],
)
@torch.inference_mode()
def test_other_products_round_few_rows_alike_or_none(options: dict[str, str], level: str) -> None:
    with oxytorch.isa.use(level):
        few = oxytorch.isa.has("fast_bf16_dot")
        model = fused("llama", torch.bfloat16, group_size=32, **options)
        assert most_alike_rows(model) == 8 if few else most_alike_rows(model) > 1000
        if few:
            found, wanted = both(model)
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("weights", [None, "int8"])
@torch.inference_mode()
def test_exact_rows_are_a_number_of_rows_that_round_alike(weights: str | None) -> None:
    model = fused("llama", torch.bfloat16, weights=weights, group_size=32)
    rows = exact_rows(model, VOCABULARY, 8)
    assert 1 <= rows <= 8
    if weights is not None:
        assert rows == 8
    for count in range(1, rows + 1):
        found, wanted = both(model, LENGTHS[:count])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@torch.inference_mode()
def test_exact_rows_hold_for_many_steps_at_every_level(level: str, weights: str | None) -> None:
    with oxytorch.isa.use(level):
        model = fused("llama", torch.bfloat16, weights=weights, group_size=32)
        rows = exact_rows(model, VOCABULARY, 8)
        joint = model.slots(rows, 200)
        single = [model.cache(1, 200) for _ in range(rows)]
        tokens = torch.randint(1, VOCABULARY, (rows, 150))
        for step in range(150):
            column = tokens[:, step : step + 1]
            found = joint_step(model, column, joint, range(rows))
            each = [model.step(column[row : row + 1], cache) for row, cache in enumerate(single)]
            assert torch.equal(found, torch.cat(each))


@torch.inference_mode()
def test_prompt_in_parts_is_the_prompt() -> None:
    model = fused("llama", torch.bfloat16, weights="int8")
    tokens = torch.randint(1, VOCABULARY, (1, 200))
    whole = model.step(tokens, model.cache(1, 200))
    for part in (33, 64, 100, 167):
        cache = model.cache(1, 200)
        for piece in tokens.split(part, 1):
            if piece.shape[1] < 33:  # few rows may be rounded in another way
                break
            logits = model.step(piece, cache)
        else:
            assert torch.equal(logits, whole)
