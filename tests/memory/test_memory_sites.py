"""Lines of code in reports for want of memory, through the function that torch calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

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


def allocate(size: int) -> int:
    function = _core.library().oxytorch_memory_torch_malloc
    function.restype = ctypes.c_void_p
    return int(function(ctypes.c_ssize_t(size), 0, None))


def activations() -> list[int]:
    return [allocate(20 * MiB) for _ in range(6)]


def test_report_names_the_lines_that_hold_most(allocator: _core.Allocator) -> None:
    allocate(8 * MiB)
    with memory.note_sites():
        kept = activations()
        allocate(40 * MiB)
        allocator.free(kept.pop())
    allocate(4 * MiB)
    with pytest.raises(memory.OutOfMemoryError) as ended:
        allocator.allocate(0, 100 * MiB)
    lines = str(ended.value).splitlines()
    held = lines[lines.index("Most is held by") + 1 :]
    assert held[0].startswith(f"  100.00 MiB in 5 blocks: {__file__}:")
    assert held[0].endswith(" allocate")
    assert held[1] == held[1].strip() or "MiB in" in held[1]
    assert "what was there before the recording" in str(ended.value)
    assert "12.00 MiB in 2 blocks" in str(ended.value)


def test_report_has_no_lines_without_a_recording(allocator: _core.Allocator) -> None:
    allocate(8 * MiB)
    assert "Most is held" not in allocator.report(0, 1)


def test_report_says_all_that_is_asked_of_it(allocator: _core.Allocator) -> None:
    blocks = [allocate(3 * MiB) for _ in range(20)]
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
