"""Fixtures of the tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The device that steps run on; in the interpreter one that can be looked into."""
    import gpu_device

    from oxytorch.optim.gpu import devices

    if not gpu_device.IS_INTERPRETED:
        yield None
        return
    yield gpu_device.install()
    devices._known[torch.device("cpu")] = None
