"""`oxytorch bench ops`: every op of the registry in every dtype."""

from __future__ import annotations

from oxytorch import isa, ops
from oxytorch.benchmark.core.jobs import Job, Settings, contest
from oxytorch.benchmark.core.subject import Subject, dtypes, names, peers
from oxytorch.benchmark.ops import runs
from oxytorch.benchmark.ops.runs import PEERS, SIZES


def _jobs(settings: Settings) -> list[Job]:
    labels = {name: PEERS[name] for name in settings.peers}
    return [
        contest(f"{op} {dtype}", runs, settings, labels, op=op, dtype=dtype)
        for op in settings.only or ops.registry()
        for dtype in settings.dtypes
    ]


def _levels() -> list[str]:
    return [level.name for level in isa.levels() if level.supported]


SUBJECT = Subject(
    "ops",
    "every op of the registry",
    15,
    _jobs,
    (
        names("--only", "only", "ops to measure (default: all)", lambda: ops.registry()),
        dtypes("dtypes (default: float32,bfloat16)", "float16"),
        peers("contestants (default: eager,compile,oxytorch)", PEERS),
        names("--size", "sizes", "samples (default: cache,memory)", lambda: SIZES, SIZES),
        names(
            "--isa", "levels", "levels at which oxytorch runs (default: the active one)", _levels
        ),
    ),
)
