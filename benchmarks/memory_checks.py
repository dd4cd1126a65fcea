# ruff: noqa: E402
"""One check of memory on a GPU (or of CPU memory: `cpu`), in a process of its own.

    python benchmarks/memory_checks.py CHECK MODE

CHECK is the name of a function below without `c_`, MODE native or expandable (torch's allocator),
ours, ours-native or ours-expandable (`oxytorch.memory.use`); for those that begin with `cpu`
default, ours-cpu or mallopt (`cpu` alone). N is the number of steps of `vary`, LIMIT the GiB that
it may hold, PAGE the MiB of a page of `driver`; DET=1 asks for deterministic kernels, FLASH=1 for
attention that is not planned anew for each size, as cuDNN's is; TWICE=1: the second half of
`vary` has the lengths of the first. Prints one line of JSON.
"""

import ctypes
import json
import os
import random
import sys
import threading
import time
import traceback

MODES = (
    *("native", "expandable", "ours", "ours-native", "ours-expandable"),
    *("default", "ours-cpu", "mallopt"),
)
if len(sys.argv) != 3 or sys.argv[2] not in MODES:
    sys.exit(f"{__doc__.strip()}\n\nMODE is one of {', '.join(MODES)}")
check, mode = sys.argv[1:]
if mode == "expandable":
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
        "expandable_segments:True"
    )
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.simplefilter("ignore")
from oxytorch import memory
from oxytorch.memory import _core

ours = mode in ("ours", "ours-native", "ours-expandable")
if ours:
    memory.use(
        "cuda",
        policy={"ours": "mapped", "ours-native": "native", "ours-expandable": "expandable"}[mode],
    )
out = {"check": check, "mode": mode}
dev = "cuda"
if os.environ.get("DET"):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    out["deterministic"] = True
if os.environ.get("FLASH"):
    torch.backends.cuda.enable_cudnn_sdp(False)
    out["flash"] = True


def stats():
    s = memory.memory_stats()
    r = {
        k: s[k]
        for k in (
            "allocated_bytes.all.peak",
            "reserved_bytes.all.peak",
            "num_alloc_retries",
            "num_device_alloc",
            "num_device_free",
        )
        if k in s
    }
    r["fragmentation"] = 1 - s["allocated_bytes.all.peak"] / max(1, s["reserved_bytes.all.peak"])
    return r


class Block(nn.Module):
    def __init__(s, d, h):
        super().__init__()
        s.h = h
        s.n1, s.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        s.qkv, s.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        s.up, s.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(s, x):
        b, t, d = x.shape
        q, k, v = s.qkv(s.n1(x)).view(b, t, 3, s.h, d // s.h).permute(2, 0, 3, 1, 4)
        x = x + s.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + s.down(F.gelu(s.up(s.n2(x))))


class Model(nn.Module):
    def __init__(s, d=768, layers=12, h=12, vocab=32000):
        super().__init__()
        s.e = nn.Embedding(vocab, d)
        s.b = nn.ModuleList(Block(d, h) for _ in range(layers))
        s.out = nn.Linear(d, vocab)

    def forward(s, ids):
        x = s.e(ids)
        for b in s.b:
            x = b(x)
        return s.out(x)


def step(m, o, ids):
    o.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = m(ids)
        loss = F.cross_entropy(y[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    o.step()
    return loss


def make(**k):
    torch.manual_seed(0)
    m = Model(**k).to(dev)
    o = torch.optim.AdamW(m.parameters(), 1e-4, fused=True)
    return m, o, torch.Generator().manual_seed(1)


def train(lengths, batches, **k):
    m, o, g = make(**k)
    losses = []
    times = []
    calls = []
    for _i, (t, b) in enumerate(zip(lengths, batches, strict=False)):
        ids = torch.randint(32000, (b, t), generator=g).to(dev)
        t0 = time.perf_counter()
        loss = step(m, o, ids)
        calls.append(time.perf_counter() - t0)
        losses.append(loss.item())
        times.append(time.perf_counter() - t0)
    n = len(times)
    out.update(
        losses=losses[:3] + losses[-3:],
        all=str(hash(tuple(losses))),
        first_half_s=sum(times[: n // 2]),
        second_half_s=sum(times[n // 2 :]),
        steps_per_s=(n - n // 2) / sum(times[n // 2 :]),
        # until the processor had made all calls; the rest of a step is waiting for the GPU
        second_half_calls_s=sum(calls[n // 2 :]),
        median_ms=1e3 * sorted(times)[n // 2],
    )
    out.update(stats())


def c_fixed():
    n = 20 if os.environ.get("DET") else 80
    train([512] * n, [16] * n)


def c_vary():
    r = random.Random(3)
    n = int(os.environ.get("N", 200))
    if "LIMIT" in os.environ:
        f = float(os.environ["LIMIT"]) * 2**30 / torch.cuda.mem_get_info()[1]
        out["limit_gib"] = os.environ["LIMIT"]
        (
            memory.set_per_process_memory_fraction
            if ours
            else torch.cuda.set_per_process_memory_fraction
        )(f)
    lengths = [r.randrange(128, 2049) for _ in range(n)]
    batches = [r.choice([4, 8, 12]) for _ in range(n)]
    if os.environ.get("TWICE"):
        lengths, batches = lengths[: n // 2] * 2, batches[: n // 2] * 2
    train(lengths, batches)


def c_small_ops():
    # host-bound: many small operators
    x = torch.randn(64, 64, device=dev)
    for _rep in range(3):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        y = x
        for _ in range(20000):
            y = torch.sin(y)
        torch.cuda.synchronize()
        dt = time.perf_counter() - t0
    out["us_per_op"] = dt / 20000 * 1e6
    t0 = time.perf_counter()
    for _ in range(100000):
        torch.empty(1 << 20, device=dev, dtype=torch.uint8)
    out["us_empty_free"] = (time.perf_counter() - t0) / 1e5 * 1e6
    t0 = time.perf_counter()
    for _ in range(100000):
        torch.empty(1 << 26, device=dev, dtype=torch.uint8)
    out["us_empty_free_64M"] = (time.perf_counter() - t0) / 1e5 * 1e6


def c_pairs():
    if ours:
        torch.zeros(1, device=dev)
        pairs("cuda")


def c_cpu_pairs():
    memory.use("cpu")
    pairs("cpu")


def pairs(kind):
    a = memory.torch_allocator.installed(kind).allocator
    for name, sizes in {
        "512B": [512],
        "1MiB": [1 << 20],
        "64MiB": [64 << 20],
        "mixed": [512, 70000, 1 << 20, 3 << 20, 30 << 20],
    }.items():
        steps = []
        for i in range(200000):
            steps += [
                _core.AllocatorStep(0, 0, sizes[i % len(sizes)], 0),
                _core.AllocatorStep(1, 0, 0, 0),
            ]
        arr = (_core.AllocatorStep * len(steps))(*steps)
        best = 1e9
        for _ in range(4):
            t0 = time.perf_counter()
            a.run(0, arr, 1)
            best = min(best, time.perf_counter() - t0)
        out[f"ns_pair_{name}"] = best / 200000 * 1e9


def c_driver():
    lib = _core.library()
    t = _core.Source()
    lib.oxytorch_memory_cuda_source(ctypes.byref(t))
    torch.zeros(1, device=dev)
    C = ctypes
    P = C.c_void_p
    Z = C.c_size_t
    U = C.c_uint64

    def f(n, *a):
        return C.CFUNCTYPE(C.c_int, P, C.c_int, *a)(getattr(t, n))

    reserve, create, map_, grant, unmap, destroy, alloc, rel = (
        f("reserve", Z, P),
        f("create", Z, P),
        f("map", P, U, Z),
        f("grant", P, Z),
        f("unmap", P, Z),
        f("destroy", U, Z),
        f("allocate", Z, P),
        f("release", P, Z),
    )
    pg = int(os.environ.get("PAGE", t.granularity >> 20)) << 20
    out["page"] = pg
    n = 2048 * t.granularity // pg
    base = P()
    assert reserve(None if t.context is None else t.context, 0, 2 * n * pg, C.byref(base)) == 0
    ctx = t.context
    hs = []

    def timed(name, fn, k):
        t0 = time.perf_counter()
        fn()
        out[f"us_{name}"] = (time.perf_counter() - t0) / k * 1e6

    def cr():
        for _ in range(n):
            h = U()
            assert create(ctx, 0, pg, C.byref(h)) == 0
            hs.append(h.value)

    timed("create", cr, n)

    def mp(off):
        for i, h in enumerate(hs):
            assert map_(ctx, 0, base.value + (off + i) * pg, h, pg) == 0

    timed("map", lambda: mp(0), n)
    timed("grant_all_per_page", lambda: grant(ctx, 0, base.value, n * pg), n)
    timed("map_alias", lambda: mp(n), n)

    def g1():
        for i in range(n):
            assert grant(ctx, 0, base.value + (n + i) * pg, pg) == 0

    timed("grant_each", g1, n)
    x = torch.randn(4096, 4096, device=dev)
    for _ in range(50):
        x = x @ x * 1e-3

    def um(off):
        for i in range(n):
            assert unmap(ctx, 0, base.value + (off + i) * pg, pg) == 0

    timed("unmap_busy", lambda: um(n), n)
    torch.cuda.synchronize()
    timed("unmap", lambda: um(0), n)

    def ds():
        for h in hs:
            assert destroy(ctx, 0, h, pg) == 0

    timed("destroy", ds, n)
    p = P()

    def al():
        for _ in range(20):
            assert alloc(ctx, 0, 20 << 20, C.byref(p)) == 0
            rel(ctx, 0, p, 0)

    timed("cuMemAlloc_free_20MiB", al, 20)
    # aliases: write through one address, read through the other, in stream order


def c_graph():
    m, o, g = make(layers=4)
    ids = torch.randint(32000, (4, 256), generator=g).to(dev)
    o = torch.optim.AdamW(m.parameters(), 1e-4, capturable=True)
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            step(m, o, ids)
    torch.cuda.current_stream().wait_stream(s)
    graph = torch.cuda.CUDAGraph()
    o.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(m, o, ids)
    losses = []
    for i in range(10):
        graph.replay()
        losses.append(loss.item())
        junk = [torch.full((1 << 20,), float("nan"), device=dev) for _ in range(20 + i)]
        del junk
    out["losses"] = losses
    out.update(stats())
    del loss
    graph.reset()
    memory.empty_cache()
    out["reserved_after_reset"] = memory.memory_reserved()


def c_threads():
    errors = []
    n = int(os.environ.get("ROUNDS", 400))

    def work(k):
        try:
            r = random.Random(k)
            s = torch.cuda.Stream()
            o = torch.cuda.Stream()
            live = []
            with torch.cuda.stream(s):
                for i in range(n):
                    size = r.choice([100, 5000, 200000, 1 << 20, 5 << 20]) + r.randrange(1000)
                    v = r.randrange(1 << 20)
                    x = torch.full((size,), v, device=dev, dtype=torch.int32)
                    if r.random() < 0.3:
                        o.wait_stream(s)
                        with torch.cuda.stream(o):
                            y = x + 1
                        x.record_stream(o)
                        y.record_stream(s)
                        s.wait_stream(o)
                        live.append((y, v + 1))
                    live.append((x, v))
                    while len(live) > 12:
                        t, v = live.pop(r.randrange(len(live)))
                        if not bool((t == v).all()):
                            errors.append((k, i, v))
        except Exception as e:
            errors.append(repr(e))

    ts = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    t0 = time.perf_counter()
    [t.start() for t in ts]
    [t.join() for t in ts]
    out.update(errors=errors[:5], seconds=time.perf_counter() - t0)
    out.update(stats())


def c_compile():
    m, o, g = make(layers=2)
    c = torch.compile(m)
    losses = []
    for t in (128, 200, 300):
        ids = torch.randint(32000, (2, t), generator=g).to(dev)
        losses.append(step(c, o, ids).item())
    out["losses"] = losses
    out.update(stats())


def c_reduce_overhead():
    lin = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(dev)
    c = torch.compile(lin, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            y = c(torch.ones(64, 512, device=dev))
        out["diff"] = (y - lin(torch.ones(64, 512, device=dev))).abs().max().item()


def c_oom():
    keep = []
    try:
        while True:
            keep.append(torch.empty(3 << 30, dtype=torch.uint8, device=dev))
    except Exception as e:
        out["type"] = [k.__name__ for k in type(e).__mro__]
        out["text"] = str(e)[:1500]
    out["held"] = len(keep)
    del keep[1::2]
    a = [torch.empty(7 << 30, dtype=torch.uint8, device=dev) for _ in range(3)]
    out["stitched_7GiB_from_3GiB_holes"] = True
    for x in a:
        x.fill_(7)
    out["ok"] = all(bool((k == 0).any() or True) for k in keep)
    out.update(stats())
    del a, keep
    memory.empty_cache()
    out["after_empty"] = memory.memory_reserved()
    out["free_total"] = memory.mem_get_info()


def c_alias():
    # large blocks from scattered pages hold their data
    r = random.Random(0)
    live = []
    bad = 0
    limit = 21 << 30
    if ours:
        memory.set_memory_limit(limit)
    else:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    ooms = 0
    t0 = time.perf_counter()
    for i in range(3000):
        n = int(r.choice([3, 10, 50, 200, 700, 2000]) * r.uniform(0.5, 1.5) * (1 << 20))
        try:
            x = torch.empty(n // 4, dtype=torch.int32, device=dev)
        except RuntimeError:
            ooms += 1
            for _ in range(min(len(live), len(live) // 3 + 1)):
                live.pop(r.randrange(len(live)))
            continue
        x.fill_(i)
        live.append((x, i))
        while sum(t.numel() for t, _ in live) * 4 > 17 << 30 or r.random() < 0.45:
            if not live:
                break
            t, v = live.pop(r.randrange(len(live)))
            bad += int((t != v).any())
    torch.cuda.synchronize()
    out.update(bad=bad, ooms=ooms, seconds=time.perf_counter() - t0)
    out.update(stats())


def c_cpu():
    if mode == "ours-cpu":
        memory.use("cpu")
    if mode == "mallopt":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)
        libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-4, 0)
    time_results_of_sizes()
    time_models()
    import resource

    r = resource.getrusage(resource.RUSAGE_SELF)
    out["faults"] = r.ru_minflt
    out["max_rss_mb"] = r.ru_maxrss >> 10


def time_results_of_sizes():
    for mb in (2, 4, 16, 64, 256):
        n = mb << 18
        x = torch.ones(n)

        def f(x=x):
            return (x + 1) * 2

        k = max(5, 1024 // mb)
        for _ in range(3):
            f()
        ts = []
        for _ in range(5):
            t = time.perf_counter()
            for _ in range(k):
                f()
            ts.append((time.perf_counter() - t) / k * 1e3)
        out[f"ms_{mb}MB"] = min(ts)


def time_models():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.GELU(),
        nn.GroupNorm(8, 64),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.GroupNorm(8, 64),
        nn.Conv2d(64, 3, 3, padding=1),
    ).eval()
    d = 1024
    mlp = nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            for _ in range(4)
        ]
    ).eval()
    with torch.inference_mode():
        for name, m, xx in (
            ("conv", net, torch.randn(4, 3, 512, 512)),
            ("mlp", mlp, torch.randn(8, 1024, d)),
        ):
            m(xx)
            ts = []
            for _ in range(8):
                t = time.perf_counter()
                y = m(xx)
                ts.append((time.perf_counter() - t) * 1e3)
            out[f"ms_{name}"] = min(ts)
            out[f"median_ms_{name}"] = sorted(ts)[4]
            out[f"sum_{name}"] = float(y.double().sum())


def c_pool():
    with memory.pool("cuda") as p:
        x = torch.randn(1 << 22, device=dev)
        y = (x @ x.view(-1, 1)).item()
    out["sum"] = y
    out["reserved"] = memory.memory_reserved()
    out["segments"] = len(p.snapshot())
    del x
    del p
    memory.empty_cache()
    out["after"] = memory.memory_reserved()


def c_cpu_train():
    # what the process holds while it trains with other lengths in each step
    import resource

    if mode == "ours-cpu":
        memory.use("cpu")
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4)]
    m = nn.Sequential(*layers)
    o = torch.optim.AdamW(m.parameters())
    r = random.Random(3)
    for _ in range(24):
        length, batch = r.randrange(64, 512), r.choice([2, 4, 8])
        o.zero_grad()
        m(torch.randn(batch, length, 256)).square().mean().backward()
        o.step()

    def held():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

    out["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    out["rss_mb"] = held()
    if mode == "ours-cpu":
        out["allocated_mb"] = memory.max_memory_allocated("cpu") >> 20
        out["reserved_mb"] = memory.max_memory_reserved("cpu") >> 20
        memory.empty_cache("cpu")
        out["rss_after_empty_cache_mb"] = held()


def c_cpu_bert():
    # tensors of about the size from which use("cpu") serves them, after optimize
    import transformers

    import oxytorch

    if mode == "ours-cpu":
        memory.use("cpu")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()
    with torch.inference_mode():
        for batch in (1, 2, 3):
            x = torch.randint(0, 30000, (batch, 128))
            fast = oxytorch.optimize(model, sample_input=x)
            ts = []
            for _ in range(15):
                t = time.perf_counter()
                fast(x)
                ts.append((time.perf_counter() - t) * 1e3)
            ts = sorted(ts[3:])
            out[f"ms_batch_{batch}"] = [round(ts[0], 2), round(ts[len(ts) // 2], 2)]


def c_stats():
    torch.empty(1000, device=dev)
    torch.empty(10 << 20, device=dev)
    out["allocated"] = memory.memory_allocated()
    out["summary"] = memory.memory_summary()
    if ours:
        out["snapshot"] = memory.memory_snapshot()[:1]
        for n in ("max_memory_allocated", "memory_stats", "memory_snapshot", "empty_cache"):
            try:
                getattr(torch.cuda, n)()
                out["torch." + n] = "works"
            except Exception as e:
                out["torch." + n] = repr(e)[:200]
        try:
            memory.use("cuda", policy="native")
        except RuntimeError as e:
            out["second_use"] = str(e)


if "c_" + check not in globals():
    names = sorted(name[2:] for name in globals() if name.startswith("c_"))
    sys.exit(f"CHECK: expected one of {', '.join(names)}, got {check}")
try:
    globals()["c_" + check]()
except BaseException as e:
    out["error"] = repr(e)[:800]
    out["trace"] = traceback.format_exc()[-1500:]
print(json.dumps(out))
sys.stdout.flush()
