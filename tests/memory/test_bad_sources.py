"""Tables of functions that lack what a policy calls, and processes with few addresses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap

import pytest
import torch

from oxytorch import memory
from oxytorch.memory import _core, torch_allocator

MiB = 1 << 20


def without(fake: _core.Fake, *names: str) -> _core.Source:
    table = _core.Source.from_buffer_copy(fake.table)
    for name in names:
        setattr(table, name, 0 if name == "devices" else None)
    return table


@pytest.mark.parametrize(
    ("policy", "name", "text"),
    [
        ("native", "allocate", "allocate and release"),
        ("native", "release", "allocate and release"),
        ("native", "devices", "at least one device"),
        ("native", "name", "a name"),
        ("mapped", "grant", "reserve, unreserve"),
        ("expandable", "memory_info", "and memory_info"),
    ],
)
def test_source_names_what_it_lacks(policy: str, name: str, text: str) -> None:
    fake = _core.Fake(64 * MiB)
    with pytest.raises(memory.MemoryLibraryError, match=text):
        _core.Allocator(without(fake, name), policy)
    fake.end()


def test_native_source_need_not_know_its_memory() -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(without(fake, "memory_info"), "native")
    block = allocator.allocate(0, 3 * MiB)
    for size in (128 * MiB, 1 << 62, (1 << 64) - 1):
        with pytest.raises(torch.OutOfMemoryError):
            allocator.allocate(0, size)
    assert "Tried to allocate" in allocator.report(0, 5)
    allocator.free(block)
    allocator.close()
    fake.end()


def test_null_arguments_are_errors() -> None:
    library = _core.library()
    assert not library.oxytorch_memory_create(None, 0)
    assert library.oxytorch_memory_name_site(1, None) != 0
    assert library.oxytorch_memory_name_site(2_000_000_000, b"x") != 0
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "native")
    size, none = ctypes.c_size_t(1000), ctypes.c_void_p(None)
    assert library.oxytorch_memory_allocate(allocator.handle, 0, size, none, none) != 0
    allocator.close()
    fake.end()


def test_limits_are_numbers_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_allocator.Installed("cpu", "native", None, None, True)  # type: ignore[arg-type]
    monkeypatch.setitem(torch_allocator._installed, "cpu", made)
    for size in (-1, 1 << 63, (1 << 64) + 1):
        with pytest.raises(ValueError, match="size: expected bytes from 0"):
            memory.set_memory_limit(size, "cpu")
    with pytest.raises(TypeError, match=r"memory_report\(device='cpu'\)"):
        memory.memory_report("cpu")  # type: ignore[arg-type]


def test_cpu_memory_serves_processes_with_few_addresses() -> None:
    script = """
        import resource, torch, oxytorch
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        oxytorch.memory.use("cpu")
        x = torch.ones(3_000_000)
        print(oxytorch.memory.memory_allocated("cpu") >= x.nbytes)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.split() == ["True"], run.stdout + run.stderr
