"""Lines of code in reports for want of memory, through the function that torch calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oxytorch import memory
from oxytorch.memory import _core

MiB = 1 << 20


@pytest.fixture
def allocator() -> Iterator[_core.Allocator]:
    """An allocator over the fake source, which torch's function calls."""
    fake = _core.Fake(256 * MiB)
    made = _core.Allocator(fake.table, "mapped")
    _core.library().oxytorch_memory_install(made.handle, 0)
    yield made
    _core.library().oxytorch_memory_install(None, 0)
    made.close()
    fake.end()


def torchs_function() -> Callable[..., int]:
    function = _core.library().oxytorch_memory_torch_malloc
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return function


def activations() -> list[int]:
    allocate = torchs_function()
    return [allocate(20 * MiB, 0, None) for _ in range(6)]


def weights() -> int:
    return torchs_function()(40 * MiB, 0, None)


def test_report_names_the_lines_that_hold_most(allocator: _core.Allocator) -> None:
    torchs_function()(8 * MiB, 0, None)
    with memory.note_sites():
        kept = activations()
        weights()
        allocator.free(kept.pop())
    torchs_function()(4 * MiB, 0, None)
    with pytest.raises(memory.OutOfMemoryError) as ended:
        allocator.allocate(0, 120 * MiB)
    lines = str(ended.value).splitlines()
    held = lines[lines.index("Most is held by") + 1 :]
    assert held[0].startswith(f"  100.00 MiB in 5 blocks: {__file__}:")
    assert "activations" in held[0] or "<listcomp>" in held[0]
    assert held[1].startswith("  40.00 MiB in 1 block: ")
    assert held[1].endswith(" weights")
    assert held[2] == "  12.00 MiB in 2 blocks: what was there before the recording"


def test_report_has_no_lines_without_a_recording(allocator: _core.Allocator) -> None:
    torchs_function()(8 * MiB, 0, None)
    assert "Most is held" not in allocator.report(0, 1)


THREAD = """
#include <cstddef>
#include <thread>
extern "C" void in_a_thread(void* (*allocate)(std::ptrdiff_t, int, void*), std::ptrdiff_t bytes) {
  std::thread([=] { allocate(bytes, 0, nullptr); }).join();
}
"""


def test_threads_that_python_knows_nothing_of_do_not_wait_for_its_lock(
    allocator: _core.Allocator, tmp_path: Path
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, built = tmp_path / "thread.cpp", tmp_path / "thread.so"
    source.write_text(THREAD)
    command = [compiler, "-shared", "-fPIC", "-pthread", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    # It keeps Python's lock while it waits for the thread, as parallel loops may.
    waits = ctypes.PyDLL(str(built)).in_a_thread
    with memory.note_sites():
        with memory.note_sites():
            pass
        waits(_core.library().oxytorch_memory_torch_malloc, ctypes.c_ssize_t(9 * MiB))
    assert "  9.00 MiB in 1 block: no Python code" in allocator.report(0, 1)


def test_lines_of_code_are_named_on_the_cpu_too() -> None:
    script = """
        import torch
        from oxytorch import memory
        memory.use("cpu")
        with memory.note_sites():
            def activations():
                return [torch.ones(1 << 20) for _ in range(3)]
            kept = activations()
            print(memory.memory_report(device="cpu"))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.startswith("host device 0. It has "), run.stdout + run.stderr
    assert "Most is held by\n  12.00 MiB in 3 blocks: <string>:7 " in run.stdout
    assert "nvidia-smi" not in run.stdout
    assert "CUDA" not in run.stdout


def test_report_says_all_that_is_asked_of_it(allocator: _core.Allocator) -> None:
    blocks = [torchs_function()(3 * MiB, 0, None) for _ in range(20)]
    for block in blocks[::2]:
        allocator.free(block)
    text = allocator.report(0, 500 * MiB)
    for part in (
        "Tried to allocate 500.00 MiB on device 0",
        "It has 256.00 MiB",
        "live 30.00 MiB",
        "cached 30.00 MiB",
        "serves smaller requests alone",
        "The largest free block has 3.00 MiB",
        "No allocator can serve this",
    ):
        assert part in text
