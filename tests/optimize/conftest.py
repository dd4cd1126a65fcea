from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small; their layers are to be packed all the same."""
    from oxytorch.optimize.passes import pack
    from oxytorch.rewriting import measure

    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 0)
    monkeypatch.setattr(measure, "TIMED", False)
