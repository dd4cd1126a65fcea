from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the zoo are small; their layers are to be packed all the same."""
    from small_layers import attribute

    module, name = attribute()
    monkeypatch.setattr(module, name, 0)
