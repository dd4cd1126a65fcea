"""The example that quantizes an image CNN: accuracy is kept, and the file gives the same scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import quantize_cnn


def test_integers_keep_the_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "digits.oxy"
    words = ["--images", "generated", "--epochs", "3", "--rounds", "1", "--save", str(file)]
    assert quantize_cnn.main(words) == 0
    shown = capsys.readouterr()
    assert "epoch 3 of 3" in shown.err and "1800 generated digits" in shown.out
    found = re.findall(r"^(float32|int8), ?\w* +([\d.]+)%", shown.out, re.MULTILINE)
    floating, integers = (float(accuracy) for _, accuracy in found)
    assert floating > 90 and abs(floating - integers) < 2
    assert "the same scores once loaded: yes" in shown.out
    assert file.stat().st_size < 2 << 20


def test_scans_of_scikit_learn_are_split() -> None:
    pytest.importorskip("sklearn")
    digits = quantize_cnn.read_digits()
    assert digits.images.shape == (1397, 1, 16, 16) and digits.test_images.shape[0] == 400
    assert digits.images.min() >= 0 and digits.images.max() <= 1
    assert torch.equal(digits.test_labels.unique(), torch.arange(10))
