"""Attention that is written out is one step, in every spelling and each way into a program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen import Seen
from torch import Tensor, nn

import oxytorch
from oxytorch.program.backend import compile_graph
from oxytorch.program.passes.written_attention import permuted, sum_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("everything_is_packed"),
]
OURS = "oxytorch::attention"
HEADS, DIM = 4, 8
LOWEST = torch.finfo(torch.float32).min


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(DIM) + mask, -1) @ v


def _scaled_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q * 0.3) @ k.mT + mask, -1) @ v


def _without_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def _bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(torch.bmm(_flat(q), _flat(k).transpose(1, 2)) * 0.25, -1)
    return torch.bmm(weights, _flat(v)).view(q.shape)


def _baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    added = mask.expand(batch, heads, length, length).reshape(-1, length, length)
    scores = torch.baddbmm(added, _flat(q), _flat(k).mT, beta=1.0, alpha=0.25)
    return torch.bmm(torch.softmax(scores, -1), _flat(v)).view(q.shape)


def _alibi(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As BLOOM has it: a bias of each head, a product in three dimensions, a mask in four."""
    batch, heads, length, _ = q.shape
    bias = torch.arange(length).mul(torch.arange(1, heads + 1)[:, None] / -8)
    bias = bias[None].expand(batch, heads, length).reshape(batch * heads, 1, length)
    scores = bias.baddbmm(_flat(q), _flat(k).mT, beta=1.0, alpha=0.25).view(
        batch, heads, length, length
    )
    weights = torch.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(batch * heads, length, length), _flat(v)).view(q.shape)


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25 + mask, -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def _filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(mask < -1, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As GPT-2 has it: a causal mask that chooses, and another that is added."""
    shown = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[None, None]
    scores = torch.where(shown, q @ k.mT / 4.0, torch.full([], torch.finfo(q.dtype).min))
    return torch.softmax(scores + mask, -1) @ v


def _in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).to(torch.float32) + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Two heads of keys, each of which serves two of queries, as in Llama."""
    batch, heads, length, dim = q.shape
    k, v = (
        each[:, :2, None].expand(batch, 2, heads // 2, length, dim).reshape(q.shape)
        for each in (k, v)
    )
    return torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    function.__name__.strip("_"): function
    for function in (
        _matmul, _scaled_query, _without_a_mask, _bmm, _baddbmm, _alibi, _einsum, _filled, _where,
        _in_float32, _grouped,
    )
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, spelling: Callable[..., Tensor], heads: int = HEADS) -> None:
        super().__init__()
        width = heads * DIM
        self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.spelling, self.heads = spelling, heads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.parts(x).view(*x.shape[:2], 3, self.heads, DIM).permute(2, 0, 3, 1, 4)
        found = self.spelling(*parts, mask)
        return self.out(found.transpose(1, 2).reshape(x.shape))


def _given(batch: int, length: int, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(batch, 1, 1, length)
    mask[0, ..., length // 2 :] = LOWEST
    return torch.randn(batch, length, heads * DIM), mask


def _same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_one_step_behind_torch_compile(
    name: str, dtype: torch.dtype, seen: Seen
) -> None:
    model = Attention(SPELLINGS[name]).eval().to(dtype)
    x, mask = _given(2, 6)
    given = x.to(dtype), mask if name == "in_float32" else mask.to(dtype)
    if name == "alibi" and dtype != torch.float32:
        pytest.skip("its bias is float32")
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    _same(run(*given), model(*given), 1e-5 if dtype == torch.float32 else 2e-2)
    assert not seen.reasons and OURS in seen.text, seen.text
    assert "softmax" not in seen.text and "bmm" not in seen.text
    # Queries, keys and values are not copied, and neither is the result.
    assert "aten::clone" not in seen.text or name in ("baddbmm", "alibi")


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_one_step_for_all_sizes(name: str, seen: Seen) -> None:
    model = Attention(SPELLINGS[name]).eval()
    run = torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=True)
    for batch, length in ((2, 6), (3, 9), (5, 33)):
        given = _given(batch, length)
        _same(run(*given), model(*given))
    assert not seen.reasons and OURS in seen.text, seen.text


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_of_exported_programs_is_one_step(name: str) -> None:
    model, given = Attention(SPELLINGS[name]).eval(), _given(2, 6)
    program = oxytorch.optimize(torch.export.export(model, given))
    assert OURS in str(program), program
    _same(program(*given), model(*given))


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_of_recorded_models_is_one_step(name: str) -> None:
    model, given = Attention(SPELLINGS[name]).eval(), _given(2, 6)
    optimized = oxytorch.optimize(model, sample_input=given, passes=["program"])
    _same(optimized(*given), model(*given))
    texts = [str(program) for program in optimized.forward.programs()]  # type: ignore[operator,union-attr]
    assert texts and all(OURS in text for text in texts), texts


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_of_torchscript_is_one_step(name: str) -> None:
    model, given = Attention(SPELLINGS[name]).eval(), _given(2, 6)
    script = torch.jit.trace(model, given)
    optimized = oxytorch.optimize(script, sample_input=given)
    _same(optimized(*given), model(*given))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", ["matmul", "bmm", "einsum"])
def test_dimensions_of_one_element(
    name: str, batch: int, heads: int, length: int, seen: Seen
) -> None:
    model, given = Attention(SPELLINGS[name], heads).eval(), _given(batch, length, heads)
    given[1][0, ..., 0] = 0.0
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    _same(run(*given), model(*given))
    assert not seen.reasons


@pytest.mark.parametrize("name", ["matmul", "filled", "baddbmm"])
@pytest.mark.parametrize("hidden", [float("-inf"), LOWEST])
def test_rows_that_see_no_key_are_those_of_the_model(name: str, hidden: float, seen: Seen) -> None:
    """NaN behind minus infinity, the mean of all values behind a finite number."""
    model, (x, mask) = Attention(SPELLINGS[name]).eval(), _given(2, 6)
    mask[1] = hidden
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    expected = model(x, mask)
    _same(run(x, mask), expected)
    assert OURS in seen.text
    assert expected[1].isnan().all() == (hidden == float("-inf") or name == "filled")


NOT_ATTENTION: dict[str, Callable[..., Any]] = {
    "weights that are returned": lambda q, k, v, mask: (
        (w := torch.softmax(q @ k.mT, -1), w @ v)[1] + w.sum(-1, keepdim=True)
    ),
    "a softmax over rows": lambda q, k, v, mask: torch.softmax(q @ k.mT, -2) @ v,
    "a softmax of the values": lambda q, k, v, mask: torch.softmax(v, -1) @ k.mT @ q,
    "scores that are squared": lambda q, k, v, mask: torch.softmax((q @ k.mT) ** 2, -1) @ v,
    "a mask that is scaled": lambda q, k, v, mask: torch.softmax((q @ k.mT + mask) * 0.5, -1) @ v,
    "weights that are turned": lambda q, k, v, mask: torch.softmax(q @ k.mT, -1).mT @ v,
    "weights that are scaled": lambda q, k, v, mask: torch.softmax(q @ k.mT, -1) * 2.0 @ v,
    "a small number in place of scores": lambda q, k, v, mask: (
        torch.softmax((q @ k.mT).masked_fill(mask < -1, -2.0), -1) @ v
    ),
    "heads that are mixed": lambda q, k, v, mask: (
        torch.softmax(q @ k.mT, -1).transpose(0, 1) @ v.transpose(0, 1)
    ),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_not_attention_stays(name: str, seen: Seen) -> None:
    spelling = NOT_ATTENTION[name]

    class Other(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            parts = self.parts(x).view(*x.shape[:2], 3, self.heads, DIM).permute(2, 0, 3, 1, 4)
            return spelling(*parts, mask)  # type: ignore[no-any-return]

    model, given = Other(spelling).eval(), _given(4, 8)
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    _same(run(*given), model(*given))
    assert not seen.reasons and (OURS not in seen.text or name == "heads that are mixed"), seen.text


@pytest.mark.parametrize("places", [*itertools.permutations(range(3))])
def test_moved_dimensions_are_those_of_permute(places: tuple[int, ...]) -> None:
    meta = torch.empty(2, 3, 5, device="meta")
    found, expected = permuted(meta, places), meta.permute(places)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("one", [(2, 1, 5), (3, 5), (1, 1), (4, 2, 3, 5)])
@pytest.mark.parametrize("other", [(2, 3, 1), (1, 5), (1,), (2, 3, 5)])
def test_forms_of_sums_are_those_of_torch(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    metas = [torch.empty(shape, device="meta") for shape in (one, other)]
    metas[0] = metas[0].bfloat16()
    for first, second in (metas, metas[::-1]):
        found, expected = sum_of(first, second), first + second
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
