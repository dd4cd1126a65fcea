"""From the start of a process to the first step of an optimizer, with nothing in any cache."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.contest import new_record, refuse
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.core.rounds import spread
from oxytorch.benchmark.optim.cases import Case

STAGES = ("imported", "device_up", "done", "making", "first_step", "second_step")
"""The first three count from the start of the process, the others are those steps alone."""
MOVED = (1e-3, 4e-3)
"""How far two steps move every weight, at least and at most; bfloat16 rounds coarsely."""

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "driver",
    "XDG_CACHE_HOME": "user",
}
"""Environment variable -> folder, empty for every process, that it names."""


@dataclass(frozen=True)
class Way:
    """A way of making the first step.

    Attributes:
        name: what `cold_start_process.py` calls it.
        needs: the module that has to be installed.
        environment: what is set for it.
        compiler: whether the process may see a C compiler.
    """

    name: str
    label: str
    needs: str = "torch"
    environment: dict[str, str] = field(default_factory=dict)
    compiler: bool = True


WAYS = {
    way.name: way
    for way in (
        Way("foreach", "torch foreach"),
        Way("fused", "torch fused"),
        Way("compile", "torch.compile of the step"),
        Way("optimi", "torch-optimi", "optimi"),
        Way("bitsandbytes", "bitsandbytes", "bitsandbytes"),
        Way("flashoptim", "FlashOptim", "flashoptim"),
        Way("oxytorch", "oxytorch", "oxytorch", compiler=False),
        Way("oxytorch image", "oxytorch, image", "oxytorch", {"OXYTORCH_GPU": "aot"}, False),
        Way("oxytorch driver", "oxytorch, PTX", "oxytorch", {"OXYTORCH_GPU": "jit"}, False),
        Way("oxytorch triton", "oxytorch, Triton", "oxytorch", {"OXYTORCH_GPU": "triton"}),
    )
}
"""Every way by name, in the order of the table."""


def measure_way(way: Way, case: Case, device: str, rounds: int, silence: float) -> Result:
    """Run the way `rounds` times, each in a fresh process with empty caches; the result as JSON."""
    result: Result = {
        "way": way.name,
        "case": case.name,
        "title": case.title,
        "tensors": len(case.shapes()),
        "device": device,
        "compiler": way.compiler,
        **new_record(way.name, way.label),
    }
    if importlib.util.find_spec(way.needs) is None:
        refuse(result, "absent", f"{way.needs} is not installed")
        return result
    try:
        runs = [_run(way, case, device, silence) for _ in range(rounds)]
    except RuntimeError as error:
        refuse(result, "failed", str(error))
        return result
    least = min(run["least_moved"] for run in runs)
    most = max(run["most_moved"] for run in runs)
    if not MOVED[0] <= least <= most <= MOVED[1]:
        text = f"two steps moved weights by {least:.2g} to {most:.2g}"
        refuse(result, "wrong", text)
        return result
    result["status"] = "measured"
    result.update(log=runs[0]["log"], device=runs[0]["device"])
    for stage in STAGES:
        result[f"{stage}_seconds"] = spread([run[stage] for run in runs])
    return result


def _run(way: Way, case: Case, device: str, silence: float) -> dict[str, Any]:
    source = (Path(__file__).parent / "cold_start_process.py").read_text(encoding="utf-8")
    job = {"way": way.name, "shapes": case.shapes(), "device": device}
    with tempfile.TemporaryDirectory(prefix="oxytorch-bench-") as folder:
        environment = {**os.environ, **way.environment}
        for variable, name in CACHES.items():
            (Path(folder) / name).mkdir()
            environment[variable] = str(Path(folder) / name)
        if not way.compiler:
            (Path(folder) / "path").mkdir()
            environment["PATH"] = str(Path(folder) / "path")
            for variable in ("CC", "CXX"):
                environment.pop(variable, None)
        try:
            done = subprocess.run(
                [sys.executable, "-c", source],
                input=json.dumps({**job, "began": time.time()}),
                capture_output=True,
                text=True,
                env=environment,
                timeout=silence,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done after {silence:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        last = told[-1].strip()[:160] if told else "nothing on standard error"
        raise RuntimeError(f"exit status {done.returncode}; last line: {last}")
    return dict(json.loads(lines[-1]))
