"""Checks `oxytorch.memory` on several NVIDIA GPUs of one machine, and its pinned memory.

    PYTHONPATH=src python benchmarks/memory/devices.py

Prints a line for each check, with what it found; one that fails does not stop the others, and makes
the exit status 1. With one GPU those that need two are skipped, and say so.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import comm
from torch.utils.data import DataLoader, TensorDataset

from oxytorch import memory

MiB = 1 << 20
CHECKS: list[tuple[Callable[[], str], int]] = []
"""Functions that return what they found, and GPUs that they need."""


def needs(gpus: int) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def add(check: Callable[[], str]) -> Callable[[], str]:
        CHECKS.append((check, gpus))
        return check

    return add


def network(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers, nn.LayerNorm(width))


def busy(device: str) -> None:
    """Work for some milliseconds on the current stream."""
    x = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        x = x @ x * 1e-4


@needs(2)
def devices_are_apart() -> str:
    before = [memory.memory_allocated(i) for i in range(2)]
    x = torch.ones(8 * MiB, device="cuda:0")
    y = torch.ones(2 * MiB, device="cuda:1")
    found = [memory.memory_allocated(i) - before[i] for i in range(2)]
    assert found == [x.nbytes, y.nbytes], found
    snapshot = memory.memory_snapshot(1)
    assert any(s["address"] <= y.data_ptr() < s["address"] + s["total_size"] for s in snapshot)
    assert all(s["device"] == 1 for s in snapshot)
    held = memory.memory_reserved(0)
    del y
    torch.cuda.synchronize(1)
    memory.empty_cache("cuda:1")
    assert memory.memory_reserved(0) == held
    assert memory.memory_allocated(1) == before[1]
    assert bool((x == 1).all())
    return f"held {held / MiB:.0f} and {memory.memory_reserved(1) / MiB:.0f} MiB"


@needs(2)
def copies_between_devices() -> str:
    count = 0
    for size in (1000, MiB, 24 * MiB):
        for one, other in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
            x = torch.arange(size, device=one, dtype=torch.int32)
            y = x.to(other)
            z = torch.empty_like(x, device=other).copy_(x, non_blocking=True)
            torch.cuda.synchronize(other)
            assert torch.equal(x.cpu(), y.cpu()) and torch.equal(x.cpu(), z.cpu())
            count += 2
    return f"{count} copies, peer access {torch.cuda.can_device_access_peer(0, 1)}"


@needs(2)
def reads_of_peers() -> str:
    """A kernel of one device reads memory of the other, where the driver allows it."""
    if not torch.cuda.can_device_access_peer(0, 1):
        return "the driver allows no access"
    x = torch.randn(4 * MiB, device="cuda:0")
    with torch.cuda.device(1):
        total = comm.reduce_add([x, torch.zeros_like(x, device="cuda:1")], 1)
    assert torch.equal(total.cpu(), x.cpu())
    gathered = comm.broadcast(x, [0, 1])
    assert torch.equal(gathered[1].cpu(), x.cpu())
    return "reduce_add and broadcast"


@needs(2)
def streams_of_both() -> str:
    """Memory that a stream of either device still reads is not given to another."""
    wrong = 0
    for _ in range(30):
        for device in ("cuda:0", "cuda:1"):
            side = torch.cuda.Stream(device)
            x = torch.full((4 * MiB,), 3.0, device=device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device), torch.cuda.stream(side):
                busy(device)
                total = x.sum()
            x.record_stream(side)
            del x
            torch.full((4 * MiB,), -1.0, device=device)
            torch.cuda.current_stream(device).wait_stream(side)
            wrong += total.item() != 3.0 * 4 * MiB
    assert wrong == 0, wrong
    return "60 blocks were left alone until their streams were done"


@needs(2)
def threads_on_both() -> str:
    errors: list[str] = []

    def work(number: int) -> None:
        device = f"cuda:{number % 2}"
        draw = random.Random(number)
        live: list[tuple[Tensor, int]] = []
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for i in range(300):
                    size = draw.choice([100, 5000, 200_000, MiB, 5 * MiB]) + draw.randrange(1000)
                    value = draw.randrange(1 << 20)
                    live.append((torch.full((size,), value, device=device), value))
                    while len(live) > 12:
                        tensor, wanted = live.pop(draw.randrange(len(live)))
                        if not bool((tensor == wanted).all()):
                            errors.append(f"{device}: step {i} lost {wanted}")
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:3]
    return "8 threads, 2400 tensors"


@needs(2)
def limits_are_per_device() -> str:
    memory.empty_cache()
    memory.set_memory_limit(memory.memory_reserved(1) + 64 * MiB, 1)
    try:
        torch.empty(256 * MiB, dtype=torch.uint8, device="cuda:1")
        raise AssertionError("no error beyond the limit")
    except torch.OutOfMemoryError as error:
        text = str(error)
    finally:
        memory.set_memory_limit(0, 1)
    assert "256" in text and "1" in text.split("256")[0] + text, text
    torch.empty(256 * MiB, dtype=torch.uint8, device="cuda:0")
    torch.empty(256 * MiB, dtype=torch.uint8, device="cuda:1")
    return text.splitlines()[0]


@needs(2)
def data_parallel() -> str:
    model = network().to("cuda:0")
    x = torch.randn(64, 512, device="cuda:0")
    wanted = model(x)
    found = nn.DataParallel(model, [0, 1])(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    return "outputs and gradients"


@needs(2)
def distributed_data_parallel() -> str:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_part, (folder,), nprocs=2)
        losses = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    assert losses[0]["weights"] == losses[1]["weights"]
    return f"10 steps of 2 processes by NCCL, held {losses[0]['held'] / MiB:.0f} MiB each"


def train_part(rank: int, folder: str) -> None:
    memory.use("cuda")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(network().cuda(), [rank])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(32 + 16 * step, 512, device="cuda")).square().mean().backward()
        optimizer.step()
    total = sum(p.double().sum() for p in model.parameters())
    assert isinstance(total, Tensor)
    found = {"weights": total.item(), "held": memory.memory_reserved()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@needs(1)
def pinned_by_torch() -> str:
    """torch's own pinned tensors, and a loader of them, beside this allocator of device memory."""
    x = torch.randn(MiB).pin_memory()
    y = x.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert x.is_pinned() and torch.equal(x, y.cpu())
    data = TensorDataset(torch.arange(4096.0).view(1024, 4))
    total = torch.zeros((), device="cuda")
    for (batch,) in DataLoader(data, 64, pin_memory=True, num_workers=2):
        assert batch.is_pinned()
        total += batch.to("cuda", non_blocking=True).sum()
    assert total.item() == 4096 * 4095 / 2, total
    return "Tensor.pin_memory and DataLoader(pin_memory=True)"


@needs(1)
def pinned_by_us() -> str:
    cache = memory.pinned("cuda:0")
    x = cache.copy(torch.randn(4 * MiB))
    assert x.is_pinned(), "torch does not take it for pinned"
    first = x.data_ptr()
    wanted = x.sum().item()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy("cuda")
        there = x.to("cuda", non_blocking=True)
        cache.record_stream(x, side)
    del x
    other = cache.copy(torch.full((4 * MiB,), -1.0))  # while the copy is still to come
    early = other.data_ptr() == first
    torch.cuda.synchronize()
    assert not early, "reused before the stream was done"
    assert abs(there.sum().item() - wanted) < 1e-2 * abs(wanted) + 1
    again = cache.empty(4 * MiB)
    assert again.data_ptr() == first, "not reused after the stream was done"
    times = {}
    for name, make in (
        ("new", lambda: torch.empty(16 * MiB).pin_memory()),
        ("again", lambda: cache.empty(16 * MiB)),
    ):
        make()
        began = time.perf_counter()
        for _ in range(5):
            make()
        times[name] = (time.perf_counter() - began) / 5 * 1e3
    held = cache.memory_stats()["reserved_bytes.all.current"] / MiB
    return f"64 MiB in {times['again']:.3f} ms, torch's {times['new']:.3f} ms; {held:.0f} MiB held"


@needs(2)
def pinned_for_both() -> str:
    caches = [memory.pinned(f"cuda:{i}") for i in range(2)]
    values = [cache.copy(torch.full((MiB,), float(i))) for i, cache in enumerate(caches)]
    for i in range(2):
        for j in range(2):  # pinned for all devices
            assert bool((values[i].to(f"cuda:{j}") == i).all())
    return "each device copies from the memory of both"


@needs(1)
def bandwidth() -> str:
    """Copies from our pinned memory are as fast as those from torch's."""
    there = torch.empty(64 * MiB, device="cuda")
    rates = []
    for source in (torch.randn(64 * MiB).pin_memory(), memory.pinned("cuda:0").empty(64 * MiB)):
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            there.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        rates.append(there.nbytes / statistics.median(times) / 1e9)
    assert rates[1] > 0.9 * rates[0], rates
    return f"torch's {rates[0]:.1f} GB/s, ours {rates[1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", help="names of checks, with commas between them")
    only = parser.parse_args().only
    names = only.split(",") if only else [check.__name__ for check, _ in CHECKS]
    memory.use("cuda")
    gpus = torch.cuda.device_count()
    print(f"torch {torch.__version__}, {gpus} x {torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for check, needed in CHECKS:
        if check.__name__ not in names:
            continue
        began = time.perf_counter()
        if needed > gpus:
            print(f"skipped  {check.__name__}: needs {needed} GPUs", flush=True)
            continue
        try:
            found = check()
        except Exception:
            failed += 1
            print(f"FAILED   {check.__name__}\n{traceback.format_exc()}", flush=True)
            continue
        took = time.perf_counter() - began
        print(f"ok       {check.__name__}, {took:.1f} s: {found}", flush=True)
    sys.stdout.flush()
    os._exit(failed > 0)  # a device that failed may not let the process end


if __name__ == "__main__":
    main()
