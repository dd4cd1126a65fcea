"""Work that one thread does sooner than a parallel region begins opens none."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from oxytorch import _library

pytestmark = pytest.mark.skipif(not _library.loaded, reason="the library is missing")

KIBIBYTES = 1 << 10
TEAMS = (1, 2, 4, 16, 64)


def _threads_for(work: int, threads: int) -> int:
    return int(_library.functions().oxytorch_threads_for(work, threads))


@pytest.mark.parametrize("threads", TEAMS)
def test_a_region_is_opened_where_it_spares_more_than_it_takes(threads: int) -> None:
    region = 32 * KIBIBYTES * (1 + math.ceil(math.log2(threads)))  # docs/running.md
    for work in (1 << shift for shift in range(4, 28)):
        found = _threads_for(work, threads)
        most = max(min(work // (64 * KIBIBYTES), threads), 1)
        spared = work - work // most
        assert found == (most if spared >= region else 1)


@pytest.mark.parametrize("work", [64 * KIBIBYTES, 256 * KIBIBYTES, 4096 * KIBIBYTES])
def test_a_larger_team_is_never_woken_for_less_work(work: int) -> None:
    is_woken = [_threads_for(work, threads) > 1 for threads in TEAMS[1:]]
    assert is_woken == sorted(is_woken, reverse=True)


SCRIPT = """
import sys, torch, oxytorch
from oxytorch import _library, ops
from torch import nn

torch.set_num_threads(int(sys.argv[1]))
split = _library.functions().oxytorch_kernels_split
torch.manual_seed(0)
layer = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)).eval()
large = torch.ones(4096, 4096)
small = {
    "rms_norm": lambda: ops.rms_norm(torch.ones(4, 256), torch.ones(256)),
    "layer_norm": lambda: ops.layer_norm(torch.ones(4, 256), torch.ones(256), torch.ones(256)),
    "softmax": lambda: ops.softmax(torch.ones(4, 256)),
    "silu_mul": lambda: ops.silu_mul(torch.ones(4, 256), torch.ones(4, 256)),
    "interaction": lambda: ops.interaction(torch.ones(2, 16), [torch.ones(2, 16)] * 8),
}
with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        model = oxytorch.optimize(layer, dtype=dtype)
        x = torch.ones(1, 128, dtype=dtype)
        small[f"linear of {dtype}"] = lambda model=model, x=x: model(x)
    for name, run in small.items():
        run()
        before = split()
        run()
        assert split() == before, name
    before = split()
    ops.rms_norm(large)
    assert (split() > before) == (torch.get_num_threads() > 1)
print("done", torch.get_num_threads())
"""


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_small_work_of_the_default_optimize_stays_on_its_thread(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(threads)], capture_output=True, text=True
    )
    assert done.stdout.split() == ["done", str(threads)], done.stderr
