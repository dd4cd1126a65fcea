"""Files of tensors: what is written comes back over the file's memory, and damage is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oxytorch.core.errors import CheckpointError
from oxytorch.core.tensor_file import (
    ALIGNMENT,
    DTYPES,
    Source,
    TensorFile,
    TensorFiles,
    bytes_of,
    write,
)


def _bytes(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensors.safetensors"


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (2, 0, 4), (1, 64)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_come_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], path: Path
) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = _bytes(count) % 2 if dtype == torch.bool else _bytes(count)
    tensor = raw.view(dtype).reshape(shape)
    hashes = write(path, {"odd": Source.of(torch.ones(3).to(torch.int8)), "t": Source.of(tensor)})
    found = TensorFile(path).tensor("t")
    assert found.dtype == dtype
    assert found.shape == shape
    assert bytes(bytes_of(found)) == bytes(raw.tolist())
    assert hashes["t"] == hashlib.sha256(bytes(raw.tolist())).hexdigest()


def test_what_fills_whole_lines_begins_at_one(path: Path) -> None:
    sizes = {"a": 3, "b": 64, "c": 200, "d": 128}
    write(path, {name: Source.of(_bytes(size)) for name, size in sizes.items()}, {"by": "a test"})
    file = TensorFile(path)
    assert file.metadata == {"by": "a test"}
    assert {n for n in sizes if file.places[n].begin % ALIGNMENT == 0} >= {"b", "d"}
    assert TensorFiles([file]).nbytes() == sum(sizes.values())


def test_who_has_mapped_a_file_keeps_it_when_it_is_replaced(path: Path) -> None:
    write(path, {"t": Source.of(torch.zeros(64))})
    before = TensorFile(path).tensor("t")
    write(path, {"t": Source.of(torch.ones(64))})
    assert torch.equal(before, torch.zeros(64))
    assert torch.equal(TensorFile(path).tensor("t"), torch.ones(64))


def test_a_write_to_a_tensor_leaves_the_file(path: Path) -> None:
    write(path, {"t": Source.of(torch.zeros(64))})
    TensorFile(path).tensor("t").fill_(1)
    assert torch.equal(TensorFile(path).tensor("t"), torch.zeros(64))


def test_a_tensor_that_cannot_be_made_leaves_the_file_that_was_there(path: Path) -> None:
    write(path, {"t": Source.of(torch.zeros(4))})

    def make() -> torch.Tensor:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write(path, {"t": Source(torch.float32, (4,), make)})
    assert [*path.parent.iterdir()] == [path]
    assert torch.equal(TensorFile(path).tensor("t"), torch.zeros(4))


GOOD: dict[str, Any] = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _altered(**fields: Any) -> dict[str, Any]:
    return {"t": {**GOOD["t"], **fields}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{]", "expected a header in JSON"),
        (b"[" * 100000, "expected a header in JSON"),
        ([], "expected a header of names, got a list"),
        ({"t": 3}, "expected a shape and two offsets of tensor 't', got 3"),
        (_altered(shape=[-2]), "expected a shape and two offsets"),
        (_altered(shape=[2.0]), "expected a shape and two offsets"),
        (_altered(data_offsets=[0]), "expected a shape and two offsets"),
        (_altered(data_offsets=[0, 1 << 63]), "expected a shape and two offsets"),
        (_altered(dtype="F31"), "to have a dtype of BOOL, .*, got F31"),
        (_altered(dtype=[]), r"to have a dtype of BOOL, .*, got \[\]"),
        (_altered(shape=[3]), "dtype F32 to have 12 bytes, got 8"),
        (_altered(shape=[4], data_offsets=[0, 16]), "a file of .* bytes: it is truncated"),
        (_altered(shape=[1], data_offsets=[0, 4]), "the end of the last tensor, got"),
        (_altered(shape=[1], data_offsets=[4, 8]), "expected tensor 't' to begin at byte"),
        ({**GOOD, "u": GOOD["t"]}, "expected tensor 'u' to begin at byte"),
    ],
)
def test_damage_is_named(header: Any, message: str, path: Path) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        TensorFile(path)


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), b"\xff" * 64, (64).to_bytes(8, "big")])
def test_other_files_are_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="expected a safetensors file, got"):
        TensorFile(path)


def test_no_file_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a file, found none"):
        TensorFile(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write(path, {"t": Source.of(torch.zeros(2))})
    with pytest.raises(CheckpointError, match="b: expected each tensor once, got 't' here and in"):
        TensorFiles([*map(TensorFile, paths)])
