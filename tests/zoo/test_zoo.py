"""Every model of the zoo means the same after `optimize`, however it was asked to optimize.

The default run takes every model in one combination of a way and a dtype, another one for each
model; `SLOW=1` in the environment, or `-m "slow or not slow"`, takes all.
"""

from __future__ import annotations

import os

import pytest
from checks import CASES, COMBINATIONS, check

ALL = bool(os.environ.get("SLOW"))
TUNED_OF = 12
"""One in so many models has `tune` in the default run."""


def _taken(index: int) -> int:
    """The place in COMBINATIONS that the default run takes of the model at a place in CASES.

    Every twelfth model has `tune`, which takes several times as long as the others.
    """
    tuned = [place for place, (way, _) in enumerate(COMBINATIONS) if way == "tune"]
    others = [place for place, (way, _) in enumerate(COMBINATIONS) if way != "tune"]
    turn, rest = divmod(index, TUNED_OF)
    places = tuned if rest == 0 else others
    return places[(turn + rest) % len(places)]


def _parameters() -> list[object]:
    """All combinations, model by model; those that the default run leaves out are marked slow."""
    parameters = []
    for index, name in enumerate(CASES):
        for place, (way, dtype) in enumerate(COMBINATIONS):
            taken = ALL or place == _taken(index)
            parameters.append(
                pytest.param(
                    name,
                    way,
                    dtype,
                    id=f"{name}-{way}-{dtype}",
                    marks=[] if taken else [pytest.mark.slow],
                )
            )
    return parameters


@pytest.mark.parametrize(("name", "way", "dtype"), _parameters())
def test_an_optimized_model_means_what_the_original_means(name: str, way: str, dtype: str) -> None:
    outcome = check(name, way, dtype)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert not outcome.findings, outcome.text


def test_the_zoo_is_as_large_as_promised() -> None:
    from architectures import ARCHITECTURES
    from networks import NETWORKS

    assert len(ARCHITECTURES) >= 100
    assert len(NETWORKS) >= 20
