"""Results that steps use up among themselves lie in an arena, and nobody can tell."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxytorch import isa, testing
from oxytorch.graph import free_memory
from oxytorch.program.program import Memory, Program, UnmetError
from threads import errors_in_threads

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.10"), reason="torch 2.10 makes no tensors with a deleter"
)

TEXT = """inputs 2 0 0
%2 = oxytorch::rms_norm %0 some %1 1e-05
%3 = aten::transpose.int %2 0 1
%4 = oxytorch::softmax %2 0.5 none
%5 = aten::mul.Tensor %3 %3
%6 = oxytorch::rms_norm %4 none 1e-05
%7 = oxytorch::layer_norm %6 some %1 none 1e-05
%8 = add %7 %4 1.0
%9 = oxytorch::softmax %8 1.0 none
%10 = aten::view %9 [ -1 ]
outputs %10 %5 %7"""
CHAIN = """inputs 1 0 0
%1 = oxytorch::rms_norm %0 none 1e-05
%2 = oxytorch::softmax %1 1.0 none
%3 = oxytorch::rms_norm %2 none 1e-05
%4 = oxytorch::softmax %3 2.0 none
outputs %4"""
WIDTH = 96


@pytest.fixture(autouse=True, params=[False, True], ids=["", "poisoned"])
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    free_memory()
    with testing.arenas(poisoned=request.param):
        yield


def _given(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed + rows))
    return [x.to(dtype), torch.linspace(0.5, 2, WIDTH).to(dtype)]


def _without(program: Program, tensors: list[Tensor]) -> list[Tensor]:
    with testing.arenas(used=False):
        return program(tensors)[0]


def _assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", [each.name for each in isa.levels() if each.supported])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_those_without(level: str, dtype: torch.dtype) -> None:
    program = Program(TEXT, [])
    with isa.use(level):
        for rows in (1, 40, 300, 7, 41, 0, 300):
            tensors = _given(rows, dtype=dtype)
            wanted = _without(program, tensors)
            for is_unseen in (False, True):
                _assert_same(program(tensors, is_unseen=is_unseen)[0], wanted)


def test_outputs_stay_when_the_program_runs_again_and_goes() -> None:
    program = Program(TEXT, [])
    kept = [(program(_given(300, seed))[0], seed) for seed in range(5)]
    wanted = [_without(program, _given(300, seed)) for _, seed in kept]
    del program
    gc.collect()
    free_memory()
    for (found, _), theirs in zip(kept, wanted, strict=True):
        _assert_same(found, theirs)


def test_memory_says_what_the_last_call_used() -> None:
    program = Program(CHAIN, [])
    assert program.memory() == Memory(0, 0) and str(program) == CHAIN
    program(_given(1000)[:1])
    one = 1000 * WIDTH * 4
    arena, results = program.memory()
    assert results == 3 * one and 2 * one <= arena <= 2 * one + 1024
    assert (
        str(program) == f"{CHAIN}\n# last call: {results} bytes of results in an arena of {arena}"
    )
    program(_given(10)[:1])
    assert program.memory().results == 0  # malloc is as good for so little
    assert Program(program.text, []).text == CHAIN


def test_results_that_leave_are_not_in_the_arena() -> None:
    last = "%2 = aten::view %1 [ -1 ]\n%3 = aten::select.int %2 0 5\noutputs %3"
    program = Program(f"inputs 1 0 0\n%1 = oxytorch::softmax %0 1.0 none\n{last}", [])
    program(_given(1000)[:1])
    assert program.memory() == Memory(0, 0)


def test_a_result_that_leaves_unforeseen_keeps_its_memory_and_is_noted() -> None:
    last = "%3 = aten::contiguous %2 =contiguous_format\noutputs %3"  # which is %2 itself
    text = CHAIN[: CHAIN.index("%3")] + last
    program = Program(text, [])
    tensors = _given(1000)[:1]
    wanted = _without(program, tensors)
    first, _ = program(tensors)
    assert program.memory().results == 2 * tensors[0].nbytes
    for seed in range(4):
        program(_given(1000, 1 + seed)[:1])
    assert program.memory().results == tensors[0].nbytes
    _assert_same(first, wanted)
    del first  # the last holder of the first arena


class _Keeping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.kept.append((found, found.clone()))
        return found


def test_who_looks_at_results_may_keep_them() -> None:
    program = Program(CHAIN, [])
    with _Keeping() as mode:
        for seed in range(3):
            program(_given(1000, seed)[:1])
    assert len(mode.kept) > 3
    for seed in range(3):
        program(_given(1000, 9 + seed)[:1])
    assert all(torch.equal(tensor, copy) for tensor, copy in mode.kept)


def test_threads_have_arenas_of_their_own() -> None:
    program = Program(TEXT, [])
    wanted = {rows: _without(program, _given(rows)) for rows in (1, 40, 300, 1000, 301, 41)}

    def call(rows: int) -> None:
        for _ in range(20):
            _assert_same(program(_given(rows))[0], wanted[rows])

    assert errors_in_threads(call, wanted) == []


def test_results_are_freed_in_other_threads() -> None:
    text = CHAIN[: CHAIN.index("%4")] + "%4 = aten::contiguous %3 =contiguous_format\noutputs %4"
    tensors = _given(1000)[:1]
    wanted = _without(Program(text, []), tensors)
    for _ in range(5):
        held = [Program(text, [])(tensors)[0]]
        _assert_same(held[0], wanted)
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()


def test_errors_and_unmet_values_leave_the_arena_free() -> None:
    start = "inputs 3 0 0"
    steps = "%3 = oxytorch::rms_norm %0 none 1e-05\n%4 = oxytorch::rms_norm %3 none 1e-05"
    wrong = Program(f"{start}\n{steps}\n%5 = oxytorch::rms_norm %4 some %1 1e-05\noutputs %5", [])
    ends = "= require %1 %2\n%5 = oxytorch::softmax %4 1.0 none\noutputs %5"
    unmet = Program(f"{start}\n{steps}\n{ends}", [])
    x, few, other = torch.randn(1000, WIDTH), torch.ones(5), torch.zeros(5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="oxytorch::rms_norm fails"):
            wrong([x, few, other])
        with pytest.raises(UnmetError):
            unmet([x, few, other])
        found = unmet([x, few, few.clone()])[0]
        _assert_same(found, _without(unmet, [x, few, few.clone()]))
    assert free_memory() <= 3 * x.nbytes  # one arena


def test_a_program_in_a_program_has_its_own() -> None:
    inner = Program(CHAIN, [])
    library = torch.library.Library("arena_test", "DEF")
    library.define("inner(Tensor x) -> Tensor")
    library.impl("inner", lambda x: inner([x])[0][0], "CPU")
    text = CHAIN.replace("%2 = oxytorch::softmax %1 1.0 none", "%2 = arena_test::inner %1")
    outer = Program(text, [])
    tensors = _given(1000)[:1]
    wanted = _without(outer, tensors)
    for _ in range(3):
        _assert_same(outer(tensors)[0], wanted)
    library._destroy()


def test_writes_change_what_they_did() -> None:
    text = """inputs 2 0 0
%2 = oxytorch::rms_norm %0 none 1e-05
%3 = aten::transpose.int %2 0 1
_ = aten::copy_ %2 %1 false
%4 = oxytorch::softmax %3 1.0 none
_ = aten::copy_ %1 %2 false
outputs %4 %2"""
    program = Program(text, [])
    x, other = torch.randn(300, WIDTH), torch.randn(300, WIDTH)
    theirs = other.clone()
    wanted = _without(program, [x, theirs])
    for _ in range(3):
        ours = other.clone()
        _assert_same(program([x, ours])[0], wanted)
        assert torch.equal(ours, theirs)


def test_sizes_are_no_tensors_that_leave() -> None:
    lines = "\n".join(f"${n} = + ${n - 1} 1" for n in range(1, 500))
    program = Program(f"inputs 1 1 0\n{lines}\noutputs %0 $499", [])
    x = torch.ones(3)
    found, sizes = program([x], [0])
    assert sizes == [499] and torch.equal(found[0], x)


def test_programs_that_resize_have_none() -> None:
    text = """inputs 1 0 0
%1 = oxytorch::rms_norm %0 none 1e-05
%2 = aten::resize_ %1 [ 2000 96 ] none
%3 = oxytorch::softmax %0 1.0 none
%4 = oxytorch::softmax %3 1.0 none
outputs %4"""
    program = Program(text, [])
    program(_given(1000)[:1])
    assert program.memory() == Memory(0, 0)


def test_memory_is_kept_for_the_next_call_and_given_back() -> None:
    program, other = Program(CHAIN, []), Program(TEXT, [])
    for _ in range(3):
        program(_given(1000)[:1])
        other(_given(1000))
    most = max(program.memory().arena, other.memory().arena)
    assert free_memory() == most  # one arena served both
    assert free_memory() == 0
    program(_given(1000)[:1])
    del program
    gc.collect()
    assert free_memory() == 0


def test_a_large_call_is_forgotten_in_time() -> None:
    program = Program(CHAIN, [])
    program(_given(20_000)[:1])
    large = program.memory().arena
    program(_given(1000)[:1])
    small = program.memory().arena
    for _ in range(64):
        program(_given(1000)[:1])
    assert large > 10 * small and free_memory() == small


def test_arenas_grow_beyond_their_first_chunk() -> None:
    program = Program(TEXT, [])
    tensors = _given(120_000)  # 46 MB
    wanted = _without(program, tensors)
    for _ in range(2):
        _assert_same(program(tensors)[0], wanted)
    free_memory()


LARGE = """inputs 1 0 0
%1 = oxytorch::rms_norm %0 none 1e-05
%2 = oxytorch::rms_norm %1 none 1e-05
%3 = aten::select.int %2 0 0
%4 = aten::unsqueeze %3 0
%5 = oxytorch::softmax %4 1.0 none
outputs %5"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts faults so")
def test_no_page_is_waited_for_once_a_call_was_made() -> None:
    program, tensors = Program(LARGE, []), _given(100_000)[:1]  # 38 MB: glibc keeps no such block
    page = os.sysconf("SC_PAGE_SIZE")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        program(tensors)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):
        faults()
    assert min(faults() for _ in range(5)) < 100
    with testing.arenas(used=False):
        assert min(faults() for _ in range(5)) > tensors[0].nbytes // page
