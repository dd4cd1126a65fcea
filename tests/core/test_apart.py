"""Torch's threads are set apart from each other once, and none stays bound to a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_RUN = """
import json, os, sys, torch
from oxytorch import _library

def masks():
    tasks = map(int, os.listdir("/proc/self/task"))
    return {task: sorted(os.sched_getaffinity(task)) for task in tasks}

allowed, before = sorted(os.sched_getaffinity(0)), {*masks()}
torch.set_num_threads(2)
os.sched_setaffinity(0, {allowed[0]})  # threads that begin now may run here alone
torch.zeros(1 << 20).add_(1)
started = [task for task, mask in masks().items() if task not in before and mask == allowed[:1]]
if sys.argv[1] == "free":
    for task in (0, *started):
        os.sched_setaffinity(task, allowed)
given = masks()
_library.functions().oxytorch_set_apart(2)
print(json.dumps({"started": len(started), "are_bound_as_before": given == masks()}))
"""


@pytest.mark.parametrize("threads_are", ["free", "bound"])
def test_threads_that_are_set_apart_may_run_where_they_did(threads_are: str) -> None:
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor, or no Linux: nothing to move")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, threads_are],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["started"] and found["are_bound_as_before"]
