"""Embedding bags of bytes: torch's format, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from marks import NEEDS_LIBRARY
from oxytorch import ops
from oxytorch.ops.quantized_embedding_bag import pack_rows, unpack_rows

pytestmark = NEEDS_LIBRARY


def hostile_rows() -> torch.Tensor:
    """A table with constant rows, zeros, huge and tiny numbers, and halves of both signs."""
    torch.manual_seed(0)
    table = torch.randn(40, 24)
    table[1], table[2], table[3] = 0.0, 3.5, -1e30
    table[4] *= 1e-30
    table[5, 0] = 1e6
    return table


def test_rows_are_those_of_torch() -> None:
    table = hostile_rows()
    ours, theirs = pack_rows(table), torch.ops.quantized.embedding_bag_byte_prepack(table)
    assert ours.shape == theirs.shape
    same = (ours == theirs).all(1)
    assert same.float().mean() > 0.8  # torch adds a small number to what it divides by
    step = (table.amax(1) - table.amin(1)) / 255
    error = (unpack_rows(ours) - table).abs().amax(1)
    assert (error <= 0.502 * step + 1e-6 * table.abs().amax(1)).all()


def test_tables_of_torch_are_read() -> None:
    theirs = torch.ops.quantized.embedding_bag_byte_prepack(hostile_rows()[6:])
    indices, offsets = torch.randint(34, (50,)), torch.tensor([0, 7, 7, 30])
    wanted = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(theirs, indices, offsets)
    found = ops.quantized_embedding_bag(theirs, indices, offsets)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_large_tables_are_packed_in_parts() -> None:
    table = torch.randn(3, 1 << 21)
    packed = pack_rows(table)
    for number in range(3):
        assert torch.equal(packed[number : number + 1], pack_rows(table[number : number + 1]))


ROWS, INDICES, OFFSETS = pack_rows(torch.ones(9, 4)), torch.arange(6), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.ones(9, 12)}, "weight of dtype uint8, got float32"),
        ({"weight": ROWS[:, :8]}, "weight of shape [rows, dim + 8], got [9, 8]"),
        ({"weight": ROWS[0]}, "weight of shape [rows, dim + 8], got [12]"),
        ({"offsets": None}, "offsets with 1-D indices, got None"),
        ({"indices": INDICES.float()}, "indices of dtype int32 or int64, got float32"),
        ({"indices": INDICES + 4}, "indices in [0, 9), got 9"),
        ({"indices": INDICES - 1}, "indices in [0, 9), got -1"),
        ({"offsets": OFFSETS + 1}, "offsets that begin with 0, got 1"),
        ({"offsets": torch.tensor([0, 7])}, "offsets to ascend from 0 to at most 6"),
        ({"mode": "max"}, "mode 'sum' or 'mean', got 'max'"),
        ({"out_dtype": "int8"}, "out_dtype 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ({"out_dtype": "float"}, "out_dtype float32, bfloat16, float16, int8 or uint8"),
        (
            {"mode": "mean", "per_sample_weights": torch.ones(6)},
            "per_sample_weights None with mode 'mean', got [6]",
        ),
        ({"per_sample_weights": torch.ones(5)}, "per_sample_weights of shape [6], got [5]"),
        (
            {"per_sample_weights": torch.ones(6).bfloat16()},
            "per_sample_weights of dtype float32, got bfloat16",
        ),
    ],
)
def test_bags_of_bytes_refuse(changed: dict[str, Any], message: str) -> None:
    arguments = {"weight": ROWS, "indices": INDICES, "offsets": OFFSETS}
    wanted = re.escape(f"quantized_embedding_bag: expected {message}")
    with pytest.raises(RuntimeError, match=wanted):
        ops.quantized_embedding_bag(**arguments | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": []}, "weights with at least one table, got none"),
        ({"weights": [ROWS]}, "indices with 1 tensors, one per table, got 2"),
        ({"offsets": []}, "offsets with 2 tensors, one per table, got 0"),
        ({"weights": [ROWS, ROWS.float()]}, "weights of dtype uint8, got float32"),
        ({"weights": [ROWS[:, :8], ROWS]}, "weights of shape [rows, dim + 8], got [9, 8]"),
        ({"weights": [ROWS, ROWS[:, 1:]]}, "weights with 12 columns in every table, got 11"),
        ({"indices": [INDICES, INDICES.int()]}, "indices of dtype int64 in every table, got int32"),
        ({"indices": [INDICES, INDICES + 4]}, "indices in [0, 9), got 9"),
        ({"offsets": [OFFSETS, OFFSETS[:1]]}, "offsets with 2 bags in every table, got 1"),
        ({"mode": "max"}, "mode 'sum' or 'mean', got 'max'"),
        ({"out_dtype": "uint8"}, "out_dtype 'float32', 'bfloat16' or 'float16', got 'uint8'"),
    ],
)
def test_merged_bags_of_bytes_refuse(changed: dict[str, Any], message: str) -> None:
    arguments = {"weights": [ROWS] * 2, "indices": [INDICES] * 2, "offsets": [OFFSETS] * 2}
    wanted = re.escape(f"quantized_merged_embedding_bag: expected {message}")
    with pytest.raises(RuntimeError, match=wanted):
        ops.quantized_merged_embedding_bag(**arguments | changed)
