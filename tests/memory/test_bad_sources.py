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


NONE, HERE, SIZE = ctypes.c_void_p(None), ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(512)
PAIR = (ctypes.c_uint64 * 2)(0, 1)
TAKES = _core.TAKES(lambda argument, stream: 1)


def test_a_null_allocator_is_an_error_of_every_function() -> None:
    library = _core.library()
    calls = {
        "allocate": (0, SIZE, NONE, HERE),
        "free": (HERE,),
        "record_stream": (HERE, NONE),
        "find": (HERE, HERE, HERE),
        "empty_cache": (-1,),
        "set_limit": (0, SIZE),
        "info": (0, HERE, HERE),
        "begin_pool": (0, PAIR, TAKES, NONE),
        "end_pool": (0, PAIR),
        "release_pool": (0, PAIR),
        "reset_peaks": (0,),
        "reset_accumulated": (0,),
        "snapshot": (0, NONE, SIZE, HERE),
        "report": (0, SIZE, NONE, SIZE, HERE),
        "listen": (NONE, NONE),
        "run": (0, HERE, SIZE, HERE, SIZE, HERE, NONE),
    }
    for name, arguments in calls.items():
        assert getattr(library, f"oxytorch_memory_{name}")(NONE, *arguments) == 3, name
        assert library.oxytorch_memory_error() == b"expected an allocator, got null", name
    assert library.oxytorch_memory_statistics(NONE, 0, NONE, 0) == 0
    library.oxytorch_memory_destroy(NONE)


def test_null_is_an_error_wherever_an_allocator_wants_a_pointer() -> None:
    library = _core.library()
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    handle = allocator.handle
    for name, *arguments in (
        ("find", HERE, NONE, HERE),
        ("find", HERE, HERE, NONE),
        ("info", 0, NONE, HERE),
        ("begin_pool", 0, NONE, TAKES, NONE),
        ("begin_pool", 0, PAIR, NONE, NONE),
        ("end_pool", 0, NONE),
        ("release_pool", 0, NONE),
        ("snapshot", 0, NONE, SIZE, NONE),
        ("run", 0, NONE, SIZE, HERE, SIZE, HERE, NONE),
        ("run", 0, HERE, SIZE, NONE, SIZE, HERE, NONE),
        ("run", 0, HERE, SIZE, HERE, SIZE, NONE, NONE),
    ):
        assert getattr(library, f"oxytorch_memory_{name}")(handle, *arguments) == 3, name
        assert b", got null" in library.oxytorch_memory_error(), name
    assert library.oxytorch_memory_empty_cache(handle, -2) == 3
    assert library.oxytorch_memory_statistics(handle, 0, NONE, 1000) > 0
    allocator.close()
    fake.end()


def test_null_is_an_error_wherever_a_source_wants_a_pointer() -> None:
    library = _core.library()
    fake = _core.Fake(64 * MiB)
    table = ctypes.byref(_core.Source())
    for name, *arguments in (
        ("host_source", NONE),
        ("cuda_source", NONE),
        ("sycl_source", NONE, NONE, 1, table),
        ("sycl_source", b"absent.so", NONE, -1, table),
        ("sycl_give", table, 0, HERE),
        ("pinned_source", NONE, table),
        ("pinned_source", table, NONE),
        ("fake_source", NONE, table),
        ("fake_count", table, HERE),
        ("fake_fail", NONE, ctypes.c_uint64(1)),
    ):
        assert getattr(library, f"oxytorch_memory_{name}")(*arguments) == 3, name
    library.oxytorch_memory_fake_end(NONE)
    assert library.oxytorch_memory_fake_mistake(NONE) == b""
    assert library.oxytorch_memory_fake_page(ctypes.byref(fake.table), 7, NONE) == 0
    fake.end()


def test_tables_that_no_policy_can_use_are_errors() -> None:
    library = _core.library()
    fake = _core.Fake(64 * MiB)

    def error_of(policy: int, **changes: object) -> str:
        table = _core.Source.from_buffer_copy(fake.table)
        for name, value in changes.items():
            setattr(table, name, value)
        assert not library.oxytorch_memory_create(ctypes.byref(table), policy)
        return library.oxytorch_memory_error().decode()

    assert "a name" in error_of(1, name=None, granularity=0)
    for granularity in (3, 1000, 1 << 63):
        assert "a granularity of at most 1 GiB" in error_of(1, granularity=granularity)
    assert "query, wait and forget" in error_of(0, query=None)
    assert "at most 1024" in error_of(0, devices=(1 << 31) - 1)
    fake.end()


def test_limits_are_numbers_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_allocator.Installed("cpu", "native", None, None, True)  # type: ignore[arg-type]
    monkeypatch.setitem(torch_allocator._installed, "cpu", made)
    for size in (-1, 1 << 63, (1 << 64) + 1):
        with pytest.raises(ValueError, match="size: expected bytes from 0"):
            memory.set_memory_limit(size, "cpu")
    with pytest.raises(TypeError, match=r"set_memory_limit: expected size in bytes, an integer"):
        memory.set_memory_limit(5.5, "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"set_memory_limit: expected size in bytes, an integer"):
        memory.set_memory_limit(True, "cpu")
    with pytest.raises(ValueError, match="memory_report: size: expected bytes from 0"):
        memory.memory_report(-1, "cpu")
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
