"""Every test leaves cores and numbers of threads as it found them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from oxytorch.runtime.threads import in_new_thread


def _state() -> tuple[object, ...]:
    return (
        os.sched_getaffinity(0),
        torch.get_num_threads(),
        in_new_thread(torch.get_num_threads),
        in_new_thread(lambda: os.sched_getaffinity(0)),
    )


@pytest.fixture(autouse=True)
def _cores_and_numbers_stay() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """What a test made is garbage after it, and its threads end."""
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) - before:
        gc.collect()  # an error that a test expected holds what its frame holds
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread
