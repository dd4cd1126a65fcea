from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs Ray: pip install 'oxytorch[ray]'")

# Small models in the format that servers open.
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
