"""Marks that tests of several folders wear."""

from __future__ import annotations

import pytest

from oxytorch import _library

NEEDS_LIBRARY = pytest.mark.skipif(
    not _library.loaded, reason=f"no compiled library: {_library.why_missing}"
)
