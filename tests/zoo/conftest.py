from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from known import mark_known

    mark_known(Path(__file__).parent, items)


@pytest.fixture(autouse=True)
def treat_small_models_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from settings import for_small_models

    for module, attribute, value in for_small_models():
        monkeypatch.setattr(module, attribute, value)
