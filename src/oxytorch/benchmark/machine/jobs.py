"""`oxytorch bench limits`, `oxytorch bench import-time` and `oxytorch bench optimize-cost`."""

from __future__ import annotations

from dataclasses import replace

from oxytorch.benchmark.core.jobs import Job, Settings, single
from oxytorch.benchmark.core.subject import Subject, dtypes, names
from oxytorch.benchmark.machine import costs, limits
from oxytorch.benchmark.models.cases import CASES


def _limit_jobs(settings: Settings) -> list[Job]:
    return [single("limits", limits, settings)]


def _import_jobs(settings: Settings) -> list[Job]:
    return [Job("import time", lambda progress, on_result: on_result(costs.measure_import_time()))]


def _optimize_jobs(settings: Settings) -> list[Job]:
    """On a copy and in place, with memory as a user's process has it."""
    places = {"on a copy": False, "in place": True}
    settings = replace(settings, allocation="system")
    return [
        single(
            f"optimize {name} {dtype} {place}",
            costs,
            settings,
            model=name,
            dtype=dtype,
            inplace=inplace,
        )
        for name in settings.only or ("bert",)
        for dtype in settings.dtypes
        for place, inplace in places.items()
    ]


LIMITS = Subject("limits", "bandwidth and matrix products", 10, _limit_jobs)
IMPORT_TIME = Subject("import-time", "what `import oxytorch` adds", 1, _import_jobs, kind="costs")
OPTIMIZE_COST = Subject(
    "optimize-cost",
    "time and peak memory of optimize()",
    1,
    _optimize_jobs,
    (names("--only", "only", "models to optimize (default: bert)", lambda: CASES), dtypes()),
    kind="costs",
)
