"""The allocator, its statistics and recordings on an NVIDIA GPU, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from oxytorch.memory import trace as traces

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of NVIDIA"),
    pytest.mark.skipif(bool(torch.version.hip), reason="a GPU of AMD"),
]
BEGIN = """
    import ctypes, os, sys, threading
    import torch, torch.nn.functional as F
    from torch import nn
    from oxytorch import memory
    MiB = 1 << 20
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    def message(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{call} raised nothing")
"""
USE = "    memory.use('cuda')\n"


def run(code: str, use: bool = True, **environment: str) -> list[str]:
    """The lines that a process prints."""
    script = textwrap.dedent(BEGIN + (USE if use else "")) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


COUNTS = """
    x = torch.ones(5 * MiB, dtype=torch.uint8, device="cuda")
    y = torch.ones(1000, dtype=torch.uint8, device="cuda")
    del x
    memory.reset_peak_memory_stats()
    z = torch.ones(70 * MiB, dtype=torch.uint8, device="cuda")
    print(memory.memory_allocated(), memory.max_memory_allocated())
    del z
    print(memory.memory_allocated("cuda:0"), memory.max_memory_allocated(0))
    assert memory.memory_reserved() >= memory.memory_allocated()
    assert memory.max_memory_reserved() >= 70 * MiB
    memory.empty_cache()
    assert memory.memory_reserved() <= 4 * MiB
    free, total = memory.mem_get_info()
    assert 0 < free < total
    assert "MiB" in memory.memory_summary()
    segments = memory.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert sum(block["size"] for block in blocks if block["state"] == "active_allocated") == 1024
    print(segments[0]["segment_pool_id"], segments[0]["stream"])
"""


def test_statistics_are_those_of_torchs_allocator() -> None:
    same = "    assert memory.memory_stats() == torch.cuda.memory_stats()\n"
    assert run(COUNTS) == run(COUNTS + same, use=False)


def test_statistics_have_all_of_torchs_keys() -> None:
    show = "    torch.ones(9, device='cuda')\n    print(*memory.memory_stats(), sep='\\n')\n"
    torchs = {key for key in run(show, use=False) if not key.startswith("reserved_bytes_by_")}
    assert not torchs - set(run(show))


def test_snapshots_have_all_of_torchs_keys() -> None:
    show = """
        kept = torch.ones(9, device="cuda")
        segment = memory.memory_snapshot()[0]
        print(*segment, sep="\\n")
        print(*("block " + key for key in segment["blocks"][0]), sep="\\n")
    """
    assert not set(run(show, use=False)) - set(run(show))


def test_limits_end_in_torchs_error_with_what_is_held() -> None:
    run("""
        kept = [torch.ones(64 * MiB, dtype=torch.uint8, device="cuda") for _ in range(2)]
        memory.set_memory_limit(memory.memory_reserved() + 32 * MiB)
        with memory.note_sites():
            more = torch.ones(24 * MiB, dtype=torch.uint8, device="cuda")
            text = message(lambda: torch.ones(100 * MiB, dtype=torch.uint8, device="cuda"))
        for part in ("OutOfMemoryError", "Tried to allocate 100.00 MiB on device 0", "its limit",
                     "Held ", "live 152.00 MiB", "waiting for other streams", "cached ",
                     "lies between live blocks", "The largest free block has ", "Most is held by",
                     "in 1 block: <string>:", "raise it with set_per_process_memory_fraction"):
            assert part in text, (part, text)
        memory.set_memory_limit(0)
        torch.ones(100 * MiB, dtype=torch.uint8, device="cuda")
        memory.empty_cache()
        total = memory.mem_get_info()[1]
        memory.set_per_process_memory_fraction(0.01)
        assert "OutOfMemoryError" in message(
            lambda: torch.empty(int(0.02 * total), dtype=torch.uint8, device="cuda"))
        assert all(bool((x == 1).all()) for x in (*kept, more))
    """)


def test_training_has_the_bits_of_torchs_allocator() -> None:
    code = """
        torch.use_deterministic_algorithms(True)
        from oxytorch import optim
        for make in (torch.optim.AdamW, optim.AdamW):
            net = network()
            optimizer = make(net.parameters(), 1e-3)
            for step in range(6):
                optimizer.zero_grad(set_to_none=True)
                junk = [torch.full((step * 100_000 + 7,), float("nan"), device="cuda")
                        for _ in range(4)]
                net(torch.full((64 + 40 * step, 256), 0.1 * step, device="cuda")) \\
                    .square().mean().backward()
                optimizer.step()
                if step == 3:
                    memory.empty_cache()  # gradients come back elsewhere
            print([p.double().sum().item().hex() for p in net.parameters()])
    """
    found = run(code, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert found == run(code, use=False, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert "nan" not in found[0]


def test_record_stream_delays_reuse() -> None:
    run("""
        work = torch.randn(4096, 4096, device="cuda")
        for _ in range(10):
            side = torch.cuda.Stream()
            x = torch.full((4 * MiB,), 3.0, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = work
                for _ in range(20):
                    y = y @ work * 1e-4
                total = x.sum()
            x.record_stream(side)
            del x
            torch.full((4 * MiB,), -1.0, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            assert total.item() == 3.0 * 4 * MiB
    """)


def test_graphs_keep_their_memory() -> None:
    run("""
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, capturable=True)
        x = torch.ones(64, 256, device="cuda")
        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        losses = []
        for _ in range(10):
            graph.replay()
            losses.append(loss.item())
            junk = [torch.full((MiB,), float("nan"), device="cuda") for _ in range(20)]
            del junk
            memory.empty_cache()
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0], losses
        held = memory.memory_reserved()
        del loss
        optimizer.zero_grad(set_to_none=True)
        graph.reset()
        memory.empty_cache()
        assert memory.memory_reserved() < held
    """)


def test_compiled_models_run() -> None:
    pytest.importorskip("triton")
    run("""
        net = network()
        compiled = torch.compile(net)
        for rows in (16, 48, 80):
            x = torch.randn(rows, 256, device="cuda")
            torch.testing.assert_close(compiled(x), net(x), rtol=2e-3, atol=2e-3)
            compiled(x).sum().backward()
    """)


def test_what_torch_cannot_do_is_an_error_at_the_call() -> None:
    out = run("""
        x = torch.ones(MiB, device="cuda")
        print(message(torch.cuda.memory_allocated))
        print(message(torch.cuda.memory_snapshot))
        print(message(torch.cuda.memory._record_memory_history))
        print(message(x.untyped_storage()._share_cuda_))
        print(message(lambda: memory.use("cuda", policy="native")))
        print(message(lambda: memory.memory_allocated(native=True)))
        print(message(lambda: memory.pool().__enter__()))
        print(message(lambda: memory.record("a.trace").__enter__()))
    """)
    assert len(out) >= 8
    text = "\n".join(out)
    for part in ("policy 'mapped' is in use", "use() replaced it", "native allocator, found"):
        assert part in text


def test_use_after_the_first_tensor_is_an_error() -> None:
    run(
        """
        x = torch.ones(5, device="cuda")
        assert "call it before the first" in message(memory.use)
        assert bool((x == 1).all())
        """,
        use=False,
    )


def test_fork_leaves_the_parents_memory_alone() -> None:
    run("""
        x = torch.full((MiB,), 2.0, device="cuda")
        child = os.fork()
        if not child:
            text = message(lambda: torch.ones(5, device="cuda"))
            del x
            os._exit(0 if "fork" in text else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert bool((x == 2).all()) and memory.memory_allocated() == x.nbytes
    """)


def test_threads_and_backward_share_the_allocator() -> None:
    run("""
        errors = []
        def work(number):
            try:
                net, stream = network(), torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for step in range(30):
                        rows = 1 + (number * 31 + step * 17) % 400
                        y = net(torch.full((rows, 256), float(number), device="cuda"))
                        y.sum().backward()
                        kept = torch.full((step * 5000 + 1,), number, device="cuda")
                        if not bool((kept == number).all()):
                            errors.append((number, step))
            except Exception as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors[:3]
    """)


def test_pool_serves_a_block_of_code() -> None:
    run(
        """
        before = memory.memory_allocated(native=True)
        with memory.pool() as pool:
            x = torch.randn(4 * MiB, device="cuda")
        assert x.isfinite().all()
        assert memory.memory_allocated() - before >= x.nbytes
        assert memory.memory_allocated() == torch.cuda.memory_allocated()
        assert len(pool.snapshot()) >= 1
        del x, pool
        memory.empty_cache()
        """,
        use=False,
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_devices_are_apart() -> None:
    run("""
        x, y = (torch.full((8 * MiB,), 1.0 + i, device=f"cuda:{i}") for i in range(2))
        assert [memory.memory_allocated(i) for i in range(2)] == [x.nbytes, y.nbytes]
        assert torch.equal(x.to("cuda:1").cpu(), x.cpu()) and bool((y == 2).all())
    """)


def test_recorded_run_replays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    run(
        f"""
        with memory.record({str(path)!r}) as recording:
            net = network()
            optimizer = torch.optim.AdamW(net.parameters())
            for step in range(5):
                recording.mark(f"step {{step}}")
                optimizer.zero_grad()
                net(torch.randn(300 + 1111 * step, 256, device="cuda")).sum().backward()
                optimizer.step()
        found = {{each.allocator: each for each in memory.replay(recording.trace)}}
        most = torch.cuda.max_memory_reserved()
        assert abs(found["native-policy"].peak_reserved - most) <= 2 * MiB
        """,
        use=False,
    )
    trace = traces.load(path)
    assert [text for _, text in trace.marks] == [f"step {step}" for step in range(5)]
    assert trace.about.lost == 0
    assert any("forward" in site for site in trace.sites)  # of torch: `python -c` has no file
