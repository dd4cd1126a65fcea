"""The example that trains in bfloat16 with split weights: it learns as float32 does."""

from __future__ import annotations

import re

import pytest

import train_bfloat16


def test_split_weights_learn_as_float32_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_bfloat16.main(["--steps", "120", "--width", "512", "--state", "int8"]) == 0
    shown = capsys.readouterr()
    assert "step 120 of 120, 0 s left" in shown.err
    row = r"^(\w+(?:, \w+)?) +([\d.]+) +([\d.]+)% +[\d.]+ ms +([\d.]+)$"
    rows = {name: own for name, *own in re.findall(row, shown.out, re.MULTILINE)}
    loss, accuracy, size = ([float(each[i]) for each in rows.values()] for i in range(3))
    assert [*rows] == ["float32", "bfloat16, plain", "bfloat16, split"]
    assert accuracy[0] > 60 and abs(loss[2] - loss[0]) < 0.02
    assert loss[1] > loss[2] + 0.02, "plain bfloat16 loses small updates"
    assert size[0] == 12 and size[1] == 6 and 6 < size[2] < 6.5
    assert "torch.bfloat16 to its layer; its checkpoint holds torch.float32" in shown.out
