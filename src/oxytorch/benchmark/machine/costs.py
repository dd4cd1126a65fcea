"""What oxytorch itself costs: the time its import adds, and time and memory of `optimize`."""

from __future__ import annotations

import ctypes
import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import oxytorch
from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.models.cases import CASES, ModelCase

IMPORT_SCRIPT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import oxytorch
end = time.perf_counter()
print(middle - start, end - middle)
"""


def measure_import_time(processes: int = 9) -> Result:
    """Seconds that `import oxytorch` takes after `import torch`, in fresh processes.

    One more process runs before them and is not counted: it brings the files into memory.
    """
    if processes < 1:
        raise ValueError(f"import-time: expected processes >= 1, got {processes}")
    torch_seconds, added_seconds = [], []
    for index in range(processes + 1):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_SCRIPT], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise JobError(f"a process with `import oxytorch` failed: {lines[-1]}", "oxytorch")
        before, added = (float(word) for word in done.stdout.split())
        if index > 0:
            torch_seconds.append(before)
            added_seconds.append(added)
    return {
        "cost": "import",
        "processes": processes,
        "torch_seconds": statistics.median(torch_seconds),
        "added_seconds": statistics.median(added_seconds),
        "added_seconds_range": [min(added_seconds), max(added_seconds)],
    }


def model_bytes(model: nn.Module) -> int:
    """Bytes of the storages of all parameters and buffers, shared ones counted once."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _status_bytes(field: str) -> int:
    """A memory field of /proc/self/status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"optimize-cost: expected a line {field} in /proc/self/status, found none")


def _return_freed_memory() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure_optimize(case: ModelCase, dtype: torch.dtype, inplace: bool) -> Result:
    """Time and peak memory of the first `optimize` call of this process.

    Memory is the process's resident set (Linux): freed memory is given back, the peak counter is
    reset, and the peak during the call is compared with the resident set before it. So the growth
    counts everything: packed weights, temporary buffers, and code loaded during the call. With
    inplace=False the original model stays, and is in the resident set before the call.
    """
    model, _ = case.build(case.batch)
    size = model_bytes(model)
    _return_freed_memory()
    # Writing 5 resets VmHWM, the peak of the resident set; see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    start = time.perf_counter()
    optimized = oxytorch.optimize(model, dtype=dtype, inplace=inplace)
    seconds = time.perf_counter() - start
    peak = _status_bytes("VmHWM")
    _return_freed_memory()
    after = _status_bytes("VmRSS")
    del optimized
    return {
        "cost": "optimize",
        "model": case.name,
        "title": case.title,
        "dtype": str(dtype).removeprefix("torch."),
        "inplace": inplace,
        "seconds": seconds,
        "model_bytes": size,
        "peak_growth_bytes": peak - before,
        "kept_growth_bytes": after - before,
        "peak_growth_over_model": (peak - before) / size,
        "peak_over_model": (size + peak - before) / size,
    }


def run_job(
    progress: Progress, settings: Settings, model: str, dtype: str, inplace: bool
) -> Result:
    """`measure_optimize` for the worker process."""
    progress("oxytorch", "optimize")
    return measure_optimize(CASES[model], getattr(torch, dtype), inplace)
