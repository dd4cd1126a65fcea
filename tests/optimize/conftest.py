from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _pack_small_layers(pack_small_layers: None) -> None:
    """The models of these tests are small."""
