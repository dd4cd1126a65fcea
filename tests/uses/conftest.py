"""Small layers are packed; every use leaves its verdict for `python -m tests.uses.table`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .compare import Verdict, compare

sys.path.insert(0, str(Path(__file__).parents[1]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from known import mark_known

    mark_known(Path(__file__).parent, items)


@pytest.fixture(autouse=True)
def _small_layers_and_one_thread(pack_small_layers: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def settle(record_property: Callable[[str, object], None]) -> Callable[[Verdict], None]:
    """Returns a function that keeps a verdict for the table, and fails where it is "wrong"."""

    def settle(verdict: Verdict) -> None:
        record_property("verdict", verdict.state)
        record_property("detail", verdict.detail)
        assert verdict.state != "wrong", verdict.detail

    return settle


@pytest.fixture
def check(settle: Callable[[Verdict], None]) -> Callable[..., None]:
    """Returns `compare` followed by `settle`."""

    def check(*args: Any, **kwargs: Any) -> None:
        settle(compare(*args, **kwargs))

    return check
