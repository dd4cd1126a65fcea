"""Steps of our own run with one team of threads, with the values that each gives alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from oxytorch import testing
from oxytorch.program.program import Program, UnmetError
from threads import errors_in_threads

# Own operators; views and little work of torch's between them; more than a little of it.
TEXT = """inputs 2 0 0
%2 = oxytorch::rms_norm %0 some %1 1e-05
%3 = aten::view %2 [ 4 -1 96 ]
%4 = oxytorch::softmax %3 0.5 none
%5 = aten::mean.dim %4 some [ 1 ] true none
%6 = aten::mul.Tensor %5 %5
%7 = oxytorch::layer_norm %6 some %1 none 1e-05
%8 = oxytorch::rms_norm %4 none 1e-05
%9 = add %8 %7 1.0
%10 = oxytorch::softmax %9 1.0 none
%11 = oxytorch::rms_norm %10 none 1e-05
outputs %11 %7 %4"""


@pytest.fixture(params=[1, 2, 3, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with testing.settings(split=True):
        yield request.param
    torch.set_num_threads(before)


def _tensors(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
    return [x.to(dtype), torch.linspace(0.5, 2, 96).to(dtype)]


def _one_by_one(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    ops = torch.ops.oxytorch
    first = ops.softmax(ops.rms_norm(x, weight, 1e-5).view(4, -1, 96), 0.5)
    mean = first.mean(1, keepdim=True)
    norm = ops.layer_norm(mean * mean, weight, None, 1e-5)
    total = ops.rms_norm(first, None, 1e-5) + norm
    return [ops.rms_norm(ops.softmax(total), None, 1e-5), norm, first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [4, 44, 4000])
def test_values_are_those_of_single_calls(threads: int, rows: int, dtype: torch.dtype) -> None:
    program, tensors = Program(TEXT, []), _tensors(rows, dtype)
    wanted = _one_by_one(*tensors)
    for _ in range(5):
        found, _ = program(tensors)
        for mine, single in zip(found, wanted, strict=True):
            assert torch.equal(mine, single)


def test_calls_start_no_threads(threads: int) -> None:
    """After the first call the same threads serve all others, of other sizes too."""
    program = Program(TEXT, [])
    for rows in (4000, 44):
        program(_tensors(rows, torch.float32))
    before = {*os.listdir("/proc/self/task")}
    for rows in (4, 44, 400, 4000) * 5:
        program(_tensors(rows, torch.float32))
    assert {*os.listdir("/proc/self/task")} <= before


def test_many_threads_have_teams_of_their_own(threads: int) -> None:
    program = Program(TEXT, [])
    wanted = {rows: _one_by_one(*_tensors(rows, torch.float32)) for rows in (4, 44, 400)}

    def call(rows: int) -> None:
        for _ in range(20):
            found, _ = program(_tensors(rows, torch.float32))
            assert all(map(torch.equal, found, wanted[rows]))

    assert errors_in_threads(call, wanted) == []


def test_errors_and_unmet_values_end_the_team(threads: int) -> None:
    chain = (
        "inputs 3 0 0\n%3 = oxytorch::rms_norm %0 none 1e-05\n%4 = oxytorch::rms_norm %3 none 1e-05"
    )
    wrong = Program(f"{chain}\n%5 = oxytorch::rms_norm %4 some %1 1e-05\noutputs %5", [])
    ends = "= require %1 %2\n%5 = oxytorch::softmax %4 1.0 none\noutputs %5"
    unmet = Program(f"{chain}\n{ends}", [])
    x, few, other = torch.randn(300, 96), torch.ones(5), torch.zeros(5)
    right = torch.ops.oxytorch.softmax(
        torch.ops.oxytorch.rms_norm(torch.ops.oxytorch.rms_norm(x, None, 1e-5), None, 1e-5)
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match="oxytorch::rms_norm fails"):
            wrong([x, few, other])
        with pytest.raises(UnmetError):
            unmet([x, few, other])
        assert torch.equal(unmet([x, few, few.clone()])[0][0], right)


COUNT = f"""
import os, sys, torch
from oxytorch import testing
from oxytorch.program.program import Program
program, tensors = Program({TEXT!r}, []), [torch.ones(4, 96), torch.ones(96)]
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
for _ in range(4):
    program(tensors)
alone = threads()
with testing.settings(split=True):
    program(tensors)
print(alone - before, threads() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux counts threads there")
def test_no_team_gathers_where_no_kernel_is_split() -> None:
    run = [sys.executable, "-c", COUNT]
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    alone, together = map(int, found.stdout.split())
    assert alone == 0 < together
