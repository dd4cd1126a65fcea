"""use(), restore() and their errors; CPU tensors in our memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from oxytorch import memory
from oxytorch.memory import _core

MiB = 1 << 20


def run(code: str) -> str:
    """What a Python process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_cpu_tensors_live_in_our_memory_and_go_back() -> None:
    out = run("""
        import torch
        from oxytorch import memory
        before = torch.ones(1 << 20)
        memory.use("cpu")
        memory.use("cpu")
        x = torch.arange(1 << 20, dtype=torch.float32)
        assert memory.memory_allocated("cpu") == 4 << 20
        small = torch.ones(1000)
        assert memory.memory_allocated("cpu") == 4 << 20
        assert (x + before)[7] == 8
        view = torch.from_numpy(x.numpy())
        del x
        memory.restore("cpu")
        later = torch.ones(1 << 20)
        assert memory.memory_allocated("cpu") == 4 << 20
        assert view[9] == 9
        del view, before
        assert memory.memory_allocated("cpu") == 0
        memory.empty_cache("cpu")
        assert memory.memory_reserved("cpu") == 0
        assert memory.max_memory_reserved("cpu") == 20 << 20
        assert later.sum() == 1 << 20
        print("done")
    """)
    assert out == "done\n"


@pytest.mark.parametrize("policy", ["expandable", "native"])
def test_cpu_memory_that_the_machine_lacks_is_refused_as_without_it(policy: str) -> None:
    try:
        torch.empty(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"), dtype=torch.uint8)
    except RuntimeError:
        pass
    else:
        pytest.skip("this kernel grants more memory than there is, with torch's allocator too")
    out = run(f"""
        import os, torch
        from oxytorch import memory
        memory.use("cpu", policy={policy!r})
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
        for times in (2, 64):
            try:
                torch.empty(times * there, dtype=torch.uint8)
            except RuntimeError as error:
                assert "can't allocate memory" in str(error), error
            else:
                raise AssertionError(times)
        assert memory.memory_reserved("cpu") == memory.max_memory_reserved("cpu") == 0
        x = torch.ones(8 << 20, dtype=torch.uint8)
        assert memory.memory_allocated("cpu") == 8 << 20
        print("done")
    """)
    assert out == "done\n"


def test_fraction_of_no_memory_is_no_end_of_the_limit() -> None:
    out = run("""
        import ctypes
        from oxytorch.memory import OutOfMemoryError, _core
        fake = _core.Fake(64 << 20)
        allocator = _core.Allocator(fake.table, "mapped")
        library = _core.library()
        library.oxytorch_memory_install(allocator.handle, 0)
        for fraction in (0.0, 1e-12, 0.5):
            library.oxytorch_memory_torch_set_fraction(ctypes.c_double(fraction), 0)
            try:
                print(allocator.allocate(0, 20 << 20) > 0)
            except OutOfMemoryError:
                print("out of memory")
    """)
    assert out.splitlines() == ["out of memory", "out of memory", "True"]


def test_limit_of_cpu_memory_ends_with_0() -> None:
    out = run("""
        import torch
        from oxytorch import memory
        memory.use("cpu")
        memory.set_memory_limit(40 << 20, "cpu")
        inside = torch.ones(5 << 20)
        beyond = torch.ones(15 << 20)  # of the C library
        print(memory.max_memory_reserved("cpu") >> 20, memory.memory_stats("cpu")["num_ooms"])
        memory.set_memory_limit(0, "cpu")
        more = torch.ones(15 << 20)
        print(memory.memory_allocated("cpu") >> 20)
        assert inside.sum() + beyond.sum() + more.sum() == 35 << 20
    """)
    assert out == "20 1\n80\n"


@pytest.mark.parametrize("policy", ["expandable", "native"])
def test_cpu_tensors_ask_for_huge_pages(policy: str) -> None:
    smaps = Path("/proc/self/smaps")
    if not (smaps.exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()):
        pytest.skip("this system has no huge pages, or does not show them")
    out = run(f"""
        import torch
        from oxytorch import memory
        memory.use("cpu", policy={policy!r})
        x = torch.ones(16 << 20, dtype=torch.uint8)
        print(x.data_ptr() % (2 << 20) if {policy == "native"} else 0)
        for line in open("/proc/self/smaps"):
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = (int(each, 16) for each in words[0].split("-"))
            elif words[0] == "VmFlags:" and begin <= x.data_ptr() < end:
                print("hg" in words)  # madvise(MADV_HUGEPAGE)
    """)
    assert out == "0\nTrue\n"


def test_cpu_memory_survives_fork_and_threads() -> None:
    out = run("""
        import os, threading, torch
        torch.set_num_threads(1)  # OpenMP has no threads after fork
        from oxytorch import memory
        memory.use("cpu")
        x = torch.ones(1 << 20)
        def work():
            for i in range(200):
                y = torch.full((300_000 + i,), float(i))
                assert bool((y == i).all())
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        child = os.fork()
        if not child:
            y = x + 1
            os._exit(0 if float(y[5]) == 2 and float(x[5]) == 1 else 1)
        for thread in threads: thread.join()
        assert os.waitpid(child, 0)[1] == 0
        assert float(x.sum()) == 1 << 20
        print(memory.memory_allocated("cpu"))
    """)
    assert out == f"{4 * MiB}\n"


def test_smaller_tensors_stay_with_malloc_and_keep_their_memory() -> None:
    out = run("""
        import resource, torch
        from oxytorch import memory
        memory.use("cpu")
        layers = [torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)]
        net, x = torch.nn.Sequential(*layers).eval(), torch.randn(1, 64, 56, 56)
        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with torch.inference_mode():
            for _ in range(3): net(x)
            before = faults()
            for _ in range(50): net(x)
        assert memory.memory_stats("cpu")["allocation.all.allocated"] == 0
        print(faults() - before)
    """)
    assert int(out) < 1000, "glibc gives back and takes again what use() has kept it from learning"


def test_statistics_need_use() -> None:
    out = run("""
        from oxytorch import memory
        try:
            memory.memory_allocated("cpu")
        except RuntimeError as error:
            print(error)
    """)
    assert "after oxytorch.memory.use('cpu')" in out


def test_use_names_what_it_takes() -> None:
    with pytest.raises(ValueError, match="use: expected device 'cuda', 'xpu' or 'cpu', got 'mps'"):
        memory.use("mps")
    with pytest.raises(ValueError, match=r"use: policy: .* leave policy out for 'expandable'"):
        memory.use("cpu", policy="mapped")
    with pytest.raises(ValueError, match="restore: expected device 'cpu'"):
        memory.restore("cuda")
    for name in ("cuda:0", "cpu:1"):
        with pytest.raises(ValueError, match=f"all devices of that kind, got '{name}'"):
            memory.use(name)
    for policy in ("best", "", 5):
        with pytest.raises(ValueError, match="use: policy: expected one of native"):
            memory.use("cpu", policy=policy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool: expected device 'cuda' or"), memory.pool("cpu"):
        pass


def test_use_takes_devices_and_their_names() -> None:
    out = run("""
        import torch
        from oxytorch import memory
        for device in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
            memory.use(device)
            x = torch.ones(1 << 20)
            print(memory.memory_allocated(device) >> 20)
            del x
            memory.restore(device)
        try:
            memory.memory_allocated("cpu:7")
        except ValueError as error:
            print(error)
    """)
    assert out.splitlines() == ["4"] * 4 + [
        "device: expected 'cpu', of which there is one, got 'cpu:7'"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["memory_snapshot", "reset_peak_memory_stats", "mem_get_info"])
def test_statistics_without_a_gpu_say_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: torch .* finds no cuda device here; name "):
        getattr(memory, name)()
    assert memory.memory_allocated() == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_use_of_cuda_says_that_torch_has_none() -> None:
    with pytest.raises(RuntimeError, match="built without CUDA"):
        memory.use("cuda")


@pytest.mark.skipif(torch.xpu._is_compiled(), reason="this torch has XPU")
def test_use_of_xpu_says_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="is built without XPU"):
        memory.use("xpu")
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    monkeypatch.delattr(torch.xpu.memory, "XPUPluggableAllocator", raising=False)
    with pytest.raises(RuntimeError, match="takes no allocator of others for XPU"):
        memory.use("xpu")


def test_calls_with_wrong_pointers_and_sizes_are_errors() -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    block = allocator.allocate(0, 1000)
    with pytest.raises(memory.MemoryLibraryError, match="no live block"):
        allocator.free(block + 512)
    allocator.free(block)
    with pytest.raises(memory.MemoryLibraryError, match="it was freed before"):
        allocator.free(block)
    with pytest.raises(memory.MemoryLibraryError, match="record_stream"):
        allocator.record_stream(block, 8)
    assert allocator.allocate(0, 0) == 0
    allocator.free(0)
    for size in (1 << 40, (1 << 64) - 1):
        with pytest.raises(torch.OutOfMemoryError, match="more than there is in all"):
            allocator.allocate(0, size)
    with pytest.raises(memory.MemoryLibraryError, match="a device from 0 to 0, got 3"):
        allocator.allocate(3, 1)
    with pytest.raises(ValueError, match="policy: expected one of native"):
        _core.Allocator(fake.table, "best")
    allocator.close()
    fake.end()


def test_large_block_is_put_together_of_free_pages() -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    blocks = [allocator.allocate(0, 4 * MiB) for _ in range(16)]
    for block in blocks[::2]:
        allocator.free(block)
    large = allocator.allocate(0, 32 * MiB)
    assert fake.counts()["held_bytes"] == 64 * MiB
    created, mapped = fake.counts()["create"], fake.counts()["map"]
    # The second time it is there.
    allocator.free(large)
    assert allocator.allocate(0, 32 * MiB) == large
    assert (fake.counts()["create"], fake.counts()["map"]) == (created, mapped)
    # Back where the pages came from, without a call of the driver.
    allocator.free(large)
    assert {allocator.allocate(0, 4 * MiB) for _ in range(8)}
    assert fake.counts()["create"] == created
    native = _core.Allocator(fake.table, "native")
    native.close()
    allocator.close()
    assert fake.counts()["held_bytes"] == 0
    assert fake.mistake() == ""
    fake.end()


def test_small_blocks_in_parts_of_large_pages_are_found_without_a_survey() -> None:
    fake = _core.Fake(1 << 30, event_delay=-1)
    allocator = _core.Allocator(fake.table, "mapped")
    kept = allocator.allocate(0, 5 * MiB, 8)  # 3 MiB of its second page are free
    allocator.free(allocator.allocate(0, 64 * MiB, 16))  # pages of a stream that is not done
    allocator.free(allocator.allocate(0, 8 * MiB, 8))
    before = fake.counts()
    blocks = [allocator.allocate(0, 512, 8) for _ in range(100)]
    assert len({*blocks, kept}) == 101
    # A survey asks whether the other stream is done.
    assert fake.counts() == before
    allocator.close()
    assert fake.mistake() == ""
    fake.end()


@pytest.mark.parametrize("policy", _core.POLICIES)
def test_nothing_waits_for_the_device_while_there_is_memory(policy: str) -> None:
    fake = _core.Fake(1 << 30, event_delay=-1)  # no work is ever done unless somebody waits
    allocator = _core.Allocator(fake.table, policy)
    for size in (MiB // 2, 3 * MiB, 40 * MiB):
        block = allocator.allocate(0, size, 8)
        allocator.record_stream(block, 16)
        allocator.free(block)
        again = allocator.allocate(0, size, 8)
        assert again != block, "stream 16 may still read it"
        allocator.free(again)
        assert allocator.allocate(0, size, 8) == again
        assert allocator.allocate(0, size, 16) not in (block, again)
    assert fake.counts()["wait"] == 0
    assert allocator.statistics(0)["num_sync_all_streams"] == 0
    allocator.close()
    assert fake.mistake() == ""
    fake.end()


@pytest.mark.parametrize("policy", _core.POLICIES)
def test_cached_memory_is_given_back_before_memory_runs_out(policy: str) -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, policy)
    kept = allocator.allocate(0, 2 * MiB)
    for size, stream in ((12 * MiB, 0), (20 * MiB, 8), (16 * MiB, 16)):
        allocator.free(allocator.allocate(0, size, stream))
    assert allocator.allocate(0, 40 * MiB)
    assert allocator.find(kept) == (kept, 2 * MiB)
    assert allocator.statistics(0)["num_ooms"] == 0
    assert (allocator.statistics(0)["num_alloc_retries"] == 0) == (policy == "mapped")
    allocator.close()
    assert fake.mistake() == ""
    fake.end()


def test_devices_are_apart_and_streams_of_one_number_are_not_one() -> None:
    fake = _core.Fake(64 * MiB, devices=2, event_delay=-1)
    allocator = _core.Allocator(fake.table, "mapped")
    first, second = (allocator.allocate(device, 40 * MiB, 8) for device in (0, 1))
    assert [allocator.statistics(d)["allocated_bytes.all.current"] for d in (0, 1)] == [
        40 * MiB
    ] * 2
    allocator.set_limit(1, 48 * MiB)
    with pytest.raises(memory.OutOfMemoryError, match="on device 1"):
        allocator.allocate(1, 20 * MiB, 8)
    assert allocator.allocate(0, 20 * MiB, 8)
    allocator.record_stream(second, 16)
    allocator.free(second)
    assert allocator.statistics(1)["active_bytes.all.current"] == 40 * MiB
    assert allocator.statistics(0)["allocated_bytes.all.current"] == 60 * MiB
    assert allocator.find(first + 5) == (first, 40 * MiB)
    assert {segment["device"] for segment in allocator.snapshot(1)} == {1}
    allocator.empty_cache(1)
    assert allocator.statistics(1)["reserved_bytes.all.current"] == 0
    allocator.close()
    assert fake.mistake() == ""
    fake.end()


def test_large_block_costs_one_page_for_each_4_mib() -> None:
    fake = _core.Fake(1 << 30)
    allocator = _core.Allocator(fake.table, "mapped")
    allocator.allocate(0, 512 * MiB)
    counts = fake.counts()
    assert (counts["create"], counts["map"], counts["grant"]) == (128, 128, 1)
    allocator.close()
    fake.end()


def test_a_device_is_not_used_after_fork() -> None:
    out = run("""
        import os
        from oxytorch.memory import MemoryLibraryError, _core
        fake = _core.Fake(64 << 20)
        allocator = _core.Allocator(fake.table, "mapped")
        block = allocator.allocate(0, 1000)
        child = os.fork()
        if not child:
            try:
                allocator.allocate(0, 1000)
            except MemoryLibraryError as error:
                allocator.free(block)
                os._exit(0 if "start processes with spawn" in str(error) else 2)
            os._exit(1)
        print(os.waitpid(child, 0)[1], allocator.statistics(0)["allocation.all.current"])
    """)
    assert out == "0 1\n"


def test_statistics_have_the_keys_that_torch_documents() -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    found = set(allocator.statistics(0))
    documented = set()
    for name in re.findall(r'- ``"([^"`]+)"``', torch.cuda.memory_stats.__doc__ or ""):
        names = [name]
        while any("{" in each for each in names):
            names = [
                re.sub(r"\{[^}]*\}", choice, each, count=1)
                for each in names
                for choice in re.findall(r"\{([^}]*)\}", each)[0].split(",")
            ]
        # The pages say "allocated", and torch "allocation".
        documented |= {re.sub(r"^allocated\.", "allocation.", each) for each in names}
    assert len(documented) > 100
    # Nested by the pools of graphs, and absent where there are none.
    assert documented - found <= {"reserved_bytes_by_private_pools"}
    assert allocator.statistics(0)["max_split_size"] == -1
    allocator.close()
    fake.end()


def test_snapshots_are_what_torchs_viewer_reads() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    fake = _core.Fake(256 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    blocks = [allocator.allocate(0, size * MiB, 8 * (size % 2)) for size in (3, 5, 20, 1)]
    allocator.record_stream(blocks[2], 16)
    allocator.free(blocks[2])
    allocator.free(blocks[0])
    snapshot = {"segments": allocator.snapshot(0), "device_traces": [[]]}
    assert snapshot["segments"][0]["segment_pool_id"] == (0, 0)
    assert "total_reserved: " in viewer.segsum(snapshot)
    page = viewer.segment_plot(snapshot)
    assert "<!DOCTYPE html>" in page
    allocator.close()
    fake.end()


def test_machine_has_memory_without_use() -> None:
    free, total = memory.mem_get_info("cpu")
    assert 0 < free < total


def test_private_pool_keeps_its_memory_until_release() -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "mapped")
    takes = _core.TAKES(lambda argument, stream: int(stream == 8))
    allocator.begin_pool(0, (0, 1), takes)
    inside = allocator.allocate(0, 8 * MiB, 8)
    allocator.end_pool(0, (0, 1))
    allocator.free(inside)
    outside = allocator.allocate(0, 8 * MiB, 8)
    assert fake.counts()["held_bytes"] == 16 * MiB, "a graph's memory was given to others"
    allocator.empty_cache(0)
    assert fake.counts()["held_bytes"] == 16 * MiB
    allocator.release_pool(0, (0, 1))
    allocator.empty_cache(0)
    assert fake.counts()["held_bytes"] == 8 * MiB
    allocator.free(outside)
    with pytest.raises(memory.MemoryLibraryError, match="release_pool"):
        allocator.release_pool(0, (5, 5))
    allocator.close()
    fake.end()


def test_limit_is_kept_and_named() -> None:
    fake = _core.Fake(1 << 30)
    allocator = _core.Allocator(fake.table, "mapped")
    allocator.set_limit(0, 32 * MiB)
    keep = allocator.allocate(0, 20 * MiB)
    peaks = {key: value for key, value in allocator.statistics(0).items() if ".peak" in key}
    with pytest.raises(memory.OutOfMemoryError, match="The limit ends this, not the device"):
        allocator.allocate(0, 20 * MiB)
    assert keep
    assert peaks.items() <= allocator.statistics(0).items()
    assert allocator.statistics(0)["num_ooms"] == 1
    allocator.set_limit(0, 0)
    assert allocator.allocate(0, 20 * MiB)
    allocator.close()
    fake.end()
