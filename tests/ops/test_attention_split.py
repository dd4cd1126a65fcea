"""Into how many items attention is split for a team of threads."""

from __future__ import annotations

import pytest

from oxytorch import _library

pytestmark = pytest.mark.skipif(not _library.loaded, reason="the library is missing")

MOST_ROWS, LEAST_ROWS = 192, 16
COSTS = {False: (6, 24), True: (16, 48)}
"""In tiles or not: what rows are a multiple of, and what keys and values cost in rows."""


def _rows(in_tiles: bool, heads: int, length: int, threads: int) -> int:
    return int(_library.functions().oxytorch_attention_rows(in_tiles, heads, length, threads))


def _cost(in_tiles: bool, heads: int, length: int, threads: int, rows: int) -> int:
    """Of the busiest thread, in rows."""
    step, keys = COSTS[in_tiles]
    rounds = -(-heads * -(-length // rows) // threads)
    return rounds * (keys + -(-rows // step) * step)


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 8, 12, 16, 64])
def test_the_busiest_thread_has_the_least_to_do(in_tiles: bool, threads: int) -> None:
    for heads in (1, 2, 8, 12, 16, 32, 96):
        for length in (1, 7, 49, 64, 128, 197, 384, 512, 2048):
            rows = _rows(in_tiles, heads, length, threads)
            assert 1 <= rows <= min(length, MOST_ROWS)
            cost = _cost(in_tiles, heads, length, threads, rows)
            blocks = range(-(-length // MOST_ROWS), max(length // LEAST_ROWS, 1) + 1)
            others = {_cost(in_tiles, heads, length, threads, -(-length // b)) for b in blocks}
            # Splits that are not tried have many items: less than a quarter of a round is lost.
            assert cost <= 5 / 4 * min(others), (heads, length, rows)


@pytest.mark.parametrize("in_tiles", [False, True])
def test_heads_stay_whole_where_pieces_would_take_more_rounds(in_tiles: bool) -> None:
    """BERT-base with 16 threads: 12 whole heads in one round, not 48 quarters in three."""
    assert _rows(in_tiles, 12, 128, 16) == 128
    assert _rows(in_tiles, 12, 128, 12) == 128
    assert _rows(in_tiles, 12, 128, 8) == 64


def test_a_single_head_is_split_among_all_threads() -> None:
    assert -(-512 // _rows(False, 1, 512, 16)) == 16
    assert -(-512 // _rows(True, 1, 512, 16)) == 16
