from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for package in ("fastapi", "uvicorn", "openai", "httpx", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}: pip install 'oxytorch[dev]'")
