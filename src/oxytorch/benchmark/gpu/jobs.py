"""`oxytorch bench gpu-optim` and `oxytorch bench cold-start`."""

from __future__ import annotations

from functools import partial

import torch

from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Job, OnResult, Settings, contest
from oxytorch.benchmark.core.subject import Option, Subject, names, peers
from oxytorch.benchmark.gpu import runs
from oxytorch.benchmark.gpu.cases import CASES
from oxytorch.benchmark.gpu.cold_start import WAYS, measure_way
from oxytorch.benchmark.gpu.contestants import PEERS
from oxytorch.benchmark.optim.jobs import ONLY, formats


def _step_jobs(settings: Settings) -> list[Job]:
    """One process for a case, as starting one takes long."""
    labels = {name: PEERS[name] for name in settings.peers}
    return [
        contest(f"steps on the GPU {case}", runs, settings, labels, case=case)
        for case in settings.cases or CASES
    ]


def _cold_jobs(settings: Settings) -> list[Job]:
    """The first step of a process, in every way."""

    def measure(name: str, case: str, progress: Progress, on_result: OnResult) -> None:
        how = settings.device, settings.rounds, settings.silence
        on_result(measure_way(WAYS[name], CASES[case], *how))

    return [
        Job(f"{name} {case}", partial(measure, name, case))
        for case in settings.cases or ("resnet50",)
        for name in settings.peers
    ]


def _check(what: str, settings: Settings) -> None:
    """Refuses what needs a GPU where there is none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"bench {what}: expected a CUDA device, found none that torch {torch.__version__} can "
            "use"
        )


STEPS = Subject(
    "gpu-optim",
    "steps of every optimizer on a GPU",
    10,
    _step_jobs,
    (
        ONLY,
        names("--case", "cases", "tensors: llama,resnet50,small (default: all)", lambda: CASES),
        peers("contestants (default: all), such as fused,optimi,oxytorch", PEERS),
        formats(" (default: float32,bfloat16,split,split+int8)"),
    ),
    check=partial(_check, "gpu-optim"),
)

_CASES = "tensors: llama,resnet50,small (default: resnet50)"
_DEVICE = {"default": "cuda", "choices": ("cuda", "cpu"), "help": "where (default: cuda)"}

COLD_START = Subject(
    "cold-start",
    "process start to an optimizer's first step",
    3,
    _cold_jobs,
    (
        names("--case", "cases", _CASES, lambda: CASES),
        peers("ways (default: all), such as fused,compile,oxytorch", WAYS),
        Option("--device", "device", _DEVICE),
    ),
    check=partial(_check, "cold-start"),
)
