from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

# Small models in the format that servers open.
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))


def _has_ray() -> bool:
    try:
        return importlib.util.find_spec("ray.serve") is not None
    except ModuleNotFoundError:
        return False


class WithoutRay(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> list[pytest.Item]:
        """Skips all of it."""
        pytest.skip("needs Ray: pip install 'oxytorch[ray]'", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Files here import Ray."""
    return None if _has_ray() else WithoutRay.from_parent(parent, path=module_path)
