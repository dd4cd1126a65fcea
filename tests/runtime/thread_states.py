"""What threads of a test are asked for."""

from __future__ import annotations

import os

import pytest
import torch

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="this process may use one core only")


def place(*_: object) -> tuple[set[int], int]:
    """The cores and the number of threads of the thread that calls this."""
    return os.sched_getaffinity(0), torch.get_num_threads()


def cores_of_team() -> list[set[int]]:
    """The cores of each thread of this thread's team, while operators run on all of them."""
    from oxytorch.runtime.threads import team

    torch.randn(1 << 18).exp_()
    return [os.sched_getaffinity(thread) for thread in team()]
