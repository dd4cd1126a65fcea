from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def treat_small_models_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from settings import for_small_models

    for module, attribute, value in for_small_models():
        monkeypatch.setattr(module, attribute, value)
