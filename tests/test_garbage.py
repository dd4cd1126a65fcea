"""The pause of the garbage collector."""

from __future__ import annotations

import gc

import pytest

from oxytorch import _garbage


def test_nothing_is_collected_inside() -> None:
    with _garbage.paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with _garbage.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ValueError, match="inside"), _garbage.paused():
        raise ValueError("inside")
    assert gc.isenabled()
