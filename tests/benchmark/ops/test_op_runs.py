from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxytorch
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.ops.runs import run_op
from oxytorch.ops import Cost, Op, Sample

ONE_ROUND = Settings(peers=("eager", "oxytorch"), sizes=("cache", "memory"), rounds=1, threads=1)


def double(x: Tensor) -> Tensor:
    return x + x


def wrong(x: Tensor) -> Tensor:
    return x * 2.1


def make_op(function: Any) -> Op:
    def samples(dtype: torch.dtype, size: str) -> list[Sample]:
        return [Sample("64", (torch.ones(64, dtype=dtype),))]

    return Op(function, double, samples, lambda x: Cost(2 * x.nbytes, x.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_op_is_measured_at_both_sizes(dtype: torch.dtype) -> None:
    cache, memory = run_op(make_op(double), dtype, ONE_ROUND, matrix_size=16)
    assert (cache["size"], memory["size"]) == ("cache", "memory")
    assert cache["read_write_bandwidth"] is None
    assert memory["read_write_bandwidth"]["median"] > 0
    for record in memory["peers"]:
        assert record["status"] == "measured"
        assert record["fraction_of_limit"]["median"] > 0
    assert memory["bytes"] == 2 * 64 * dtype.itemsize


def test_a_wrong_op_gets_no_speed() -> None:
    for result in run_op(make_op(wrong), torch.float32, ONE_ROUND, matrix_size=16):
        eager, ours = result["peers"]
        assert eager["status"] == "measured"
        assert ours["status"] == "wrong"
        assert "seconds" not in ours


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, 2.1])
def test_what_an_op_writes_is_compared(factor: float) -> None:
    def double_in_place(x: Tensor) -> None:
        x.mul_(2.0)

    def in_place(x: Tensor) -> None:
        x.mul_(factor)

    def samples(dtype: torch.dtype, size: str) -> list[Sample]:
        return [Sample("64", (torch.ones(64, dtype=dtype),))]

    cost = make_op(double).least_work
    op = Op(in_place, double_in_place, samples, cost, has_gradient=False, writes=("x",))
    for result in run_op(op, torch.float32, ONE_ROUND, matrix_size=16):
        eager, ours = result["peers"]
        assert eager["status"] == "measured"
        assert ours["status"] == ("measured" if factor == 2.0 else "wrong")


@pytest.mark.slow
def test_levels_are_separate_contestants() -> None:
    levels = [level.name for level in oxytorch.isa.levels() if level.supported][:2]
    if not levels:
        pytest.skip("the library is not built here, so there are no levels")
    settings = Settings(
        sizes=("cache",), peers=("oxytorch",), levels=tuple(levels), rounds=1, threads=1
    )
    op = oxytorch.ops.registry()["rms_norm"]
    [result] = run_op(op, torch.float32, settings, matrix_size=16)
    names = [record["peer"] for record in result["peers"]]
    assert names == ["eager", *(f"oxytorch {level}" for level in levels)]
    assert all(record["status"] == "measured" for record in result["peers"])
