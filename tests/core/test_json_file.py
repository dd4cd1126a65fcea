"""Files of JSON: what is no object, no list or no JSON at all is an error that names the file."""

from pathlib import Path

import pytest

from oxytorch.core.errors import CheckpointError
from oxytorch.core.json_file import read_json, read_json_list


def test_objects_and_lists_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}
    path.write_text("[1, 2]")
    assert read_json_list(path) == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff{}", b"[" * 100_000], ids=range(4))
def test_other_files_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (read_json, read_json_list):
        with pytest.raises(CheckpointError, match=r"config\.json: expected a file in JSON, got"):
            read(path)


def test_a_missing_file_and_another_kind_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"expected a file in JSON, got .*No such file"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object in JSON, got a list"):
        read_json(path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="expected a list in JSON, got a dict"):
        read_json_list(path)
