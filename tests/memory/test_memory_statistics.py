"""Each function of the statistics: over CPU memory of ours, and over torch's own allocators."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from oxytorch import memory
from oxytorch.memory import torch_allocator

MiB = 1 << 20
STATS = {
    "allocated_bytes.all.current": 1,
    "allocated_bytes.all.peak": 2,
    "reserved_bytes.all.current": 3,
    "reserved_bytes.all.peak": 4,
    "num_ooms": 5,
}
FUNCTIONS = {
    "memory_stats": ((), "memory_stats", STATS),
    "memory_allocated": ((), "memory_stats", 1),
    "max_memory_allocated": ((), "memory_stats", 2),
    "memory_reserved": ((), "memory_stats", 3),
    "max_memory_reserved": ((), "memory_stats", 4),
    "memory_summary": ((), "memory_stats", None),
    "memory_snapshot": ((), "memory_snapshot", [{"device": 1, "blocks": []}]),
    "reset_peak_memory_stats": ((), "reset_peak_memory_stats", None),
    "reset_accumulated_memory_stats": ((), "reset_accumulated_memory_stats", None),
    "empty_cache": ((), "empty_cache", None),
    "set_per_process_memory_fraction": ((0.5,), "set_per_process_memory_fraction", None),
    "mem_get_info": ((), "mem_get_info", (7, 8)),
}
"""Arguments before the device, torch's function behind it, and what the stand-in makes of it."""


@pytest.mark.parametrize("is_asked", [False, True], ids=["without-use", "native"])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torchs_own_allocator_is_read(
    name: str, kind: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, torchs, wanted = FUNCTIONS[name]
    calls: list[Any] = []
    answers = {
        "memory_stats": STATS,
        "memory_snapshot": [{"device": 0, "blocks": []}, {"device": 1, "blocks": []}],
        "mem_get_info": (7, 8),
    }

    def stand_in(*given: Any) -> Any:
        calls.append(given)
        return answers.get(torchs)

    module = getattr(torch, kind)
    monkeypatch.setattr(module, torchs, stand_in)
    if is_asked:
        # A pool of ours leaves torch's allocator in place.
        pool = torch_allocator.Installed(kind, "mapped", None, None, False)  # type: ignore[arg-type]
        monkeypatch.setitem(torch_allocator._installed, kind, pool)
    found = getattr(memory, name)(*arguments, f"{kind}:1", native=is_asked)
    of_all = torchs in ("empty_cache", "memory_snapshot")
    assert calls == [arguments if of_all else (*arguments, 1)]
    if name == "memory_summary":
        assert f"{kind}:1 by torch's native allocator; out of memory 5 times" in found
    else:
        assert found == wanted


def test_torchs_allocator_cannot_be_read_once_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = torch_allocator.Installed("cuda", "mapped", None, None, True)  # type: ignore[arg-type]
    monkeypatch.setitem(torch_allocator._installed, "cuda", made)
    for name, (arguments, _, _) in FUNCTIONS.items():
        with pytest.raises(RuntimeError, match=r"not in use; use\(\) replaced it"):
            getattr(memory, name)(*arguments, 0, native=True)


@pytest.mark.parametrize("device", ["gpu", "", 1.5, True, ["cuda"], "cuda:x", -1])
def test_what_is_no_device_is_named(device: Any) -> None:
    for call in (memory.memory_stats, memory.mem_get_info, memory.empty_cache, memory.pinned):
        with pytest.raises(ValueError, match="device: expected a torch device, its name such as"):
            call(device)


def test_torch_counts_no_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_allocator.Installed("cpu", "native", None, None, True)  # type: ignore[arg-type]
    monkeypatch.setitem(torch_allocator._installed, "cpu", made)
    with pytest.raises(RuntimeError, match="native=True: torch's allocator of CPU memory counts n"):
        memory.memory_stats("cpu", native=True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_limits_in_bytes_and_reports_need_use(device: str) -> None:
    for call, arguments in ((memory.set_memory_limit, (1 << 30,)), (memory.memory_report, (0,))):
        with pytest.raises(RuntimeError, match=rf"oxytorch.memory.use\('{device}'\)"):
            call(*arguments, device)


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan"), "half", None])
def test_fraction_is_a_part_of_one(fraction: Any) -> None:
    with pytest.raises(ValueError, match="fraction: expected a number above 0 and up to 1"):
        memory.set_per_process_memory_fraction(fraction, "cpu")


@pytest.mark.parametrize("policy", ["expandable", "native"])
def test_all_functions_know_cpu_memory(policy: str) -> None:
    script = f"""
        import torch
        from oxytorch import memory
        memory.use("cpu", policy={policy!r})
        MiB = 1 << 20
        x = torch.ones(5 * MiB, dtype=torch.uint8)
        y = torch.ones(30 * MiB, dtype=torch.uint8)
        del y
        assert memory.memory_allocated("cpu") == 5 * MiB
        assert memory.max_memory_allocated("cpu") == 35 * MiB
        held = memory.memory_reserved("cpu")
        assert held == memory.max_memory_reserved("cpu") >= 35 * MiB
        stats = memory.memory_stats("cpu")
        assert stats["allocation.all.allocated"] == 2 and stats["allocation.all.freed"] == 1
        assert "policy {policy}" in memory.memory_summary("cpu")
        segments = memory.memory_snapshot("cpu")
        assert sum(segment["total_size"] for segment in segments) == held
        assert sum(segment["allocated_size"] for segment in segments) == 5 * MiB
        memory.reset_peak_memory_stats("cpu")
        memory.reset_accumulated_memory_stats("cpu")
        assert memory.max_memory_allocated("cpu") == 5 * MiB
        assert memory.memory_stats("cpu")["allocation.all.allocated"] == 0
        memory.empty_cache("cpu")
        assert 5 * MiB <= memory.memory_reserved("cpu") < held
        free, total = memory.mem_get_info("cpu")
        assert 0 < free < total
        memory.set_memory_limit(memory.memory_reserved("cpu") + 4 * MiB, "cpu")
        z = torch.ones(64 * MiB, dtype=torch.uint8)
        assert memory.memory_allocated("cpu") == 5 * MiB, "beyond the limit it is malloc's"
        memory.set_per_process_memory_fraction(1.0, "cpu")
        w = torch.ones(64 * MiB, dtype=torch.uint8)
        assert memory.memory_allocated("cpu") == 69 * MiB
        assert "live 69.00 MiB" in memory.memory_report(device="cpu")
        assert x.sum() == 5 * MiB and z.sum() == w.sum() == 64 * MiB
        print("done")
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout == "done\n", run.stdout + run.stderr
