"""Settings that every test shares."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
