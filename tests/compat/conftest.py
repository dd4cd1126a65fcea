"""Programs of the predecessor's in essence, and running them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oxytorch import compat

PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture
def installed() -> Iterator[None]:
    """What `install` does, for one test."""
    compat.install()
    try:
        yield
    finally:
        compat.uninstall()
