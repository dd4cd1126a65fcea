"""How fast this process reads weights."""

from __future__ import annotations

import pytest

from oxytorch.llm_command.read_limit import read_limit


def test_read_limit_is_a_plausible_speed():
    assert 1e8 < read_limit([1 << 20, 3 << 20], sweeps=2) < 1e13
    with pytest.raises(ValueError, match="sizes >= 0"):
        read_limit([])
